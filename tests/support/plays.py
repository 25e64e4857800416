"""Requests that come to an engine and are cancelled between its steps."""

import functools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from dtgpt.inference.engine import Engine
from dtgpt.inference.request import PromptJob, SequenceUpdate
from dtgpt.inference.scheduler import Scheduler
from dtgpt.models.config import ModelConfig
from tests.support.bodies_engine import inference_stages, poison
from tests.support.eager_graphs import with_prompts_together
from tests.support.engines import drain


class Submit(NamedTuple):
    request: PromptJob


class Cancel(NamedTuple):
    handle: int  # of a request that was submitted before


class Steps(NamedTuple):
    count: int


@dataclass
class Outcome:
    """What a choice of a request got."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    finish: str | None = None
    score: float | None = None


PROMPT = -1  # in place of a choice: the scores of the prompt
Outcomes = dict[tuple[int, int], Outcome]  # by handle and choice


def play(
    config: ModelConfig, plan: str, slots: int, sizes: tuple[int, int], actions: list[Submit | Cancel | Steps],
    batch_tokens: int = 0,
) -> Outcomes:  # fmt: skip
    """The outcomes on rank 0 of a plan, none on other ranks. The cache begins with NaN. sizes: tokens between the cuts
    of a prompt, and most steps of a round. batch_tokens: of a pass over several prompts; 0: one prompt a pass."""
    stages, mesh = inference_stages(config, plan) if dist.is_initialized() else stages_here(config, plan)
    engine = Engine(stages, mesh, config, torch.float32, slots)
    poison(engine._rank_step.cache)
    with_prompts_together(engine, batch_tokens)
    engine.scheduler = Scheduler(slots, *sizes, idle_tokens=batch_tokens)
    if mesh.rank > 0:
        engine.follow()
        return {}
    events: list[SequenceUpdate] = []
    for action in actions:
        match action:
            case Submit(request):
                engine.submit(request)
            case Cancel(handle):
                engine.cancel(handle)
            case Steps(count):
                for _ in range(count):
                    events += engine.step()
    events += drain(engine)
    assert not engine.scheduler.busy and sorted(engine.scheduler._free) == list(range(slots))
    engine.release()
    return collect(events)


stages_here = functools.cache(inference_stages)  # which an engine leaves as they were


def collect(events: list[SequenceUpdate]) -> Outcomes:
    outcomes: Outcomes = defaultdict(Outcome)
    for event in events:
        if event.prompt is not None and (event.job, PROMPT) not in outcomes:
            scores = event.prompt
            outcomes[event.job, PROMPT] = Outcome(scores.ids[1:], scores.logprobs, scores.alternatives, "scored")
        found = outcomes[event.job, event.choice]
        assert found.finish is None, "an event after the last one"
        found.ids += event.ids
        found.logprobs += event.logprobs
        found.alternatives += event.alternatives
        found.finish = event.finish
        for choice, completion in enumerate(event.completions or []):
            outcomes[event.job, choice].score = completion.score
    return dict(outcomes)

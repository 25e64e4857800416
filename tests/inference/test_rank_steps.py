"""What kernels and CUDA graphs do otherwise in the steps of a rank, together as on a GPU; here with modules in place of
kernels, and graphs that run eagerly."""

import pytest
import torch

from dtgpt.inference.captured import step as captured
from dtgpt.inference.engine import Engine
from dtgpt.inference.kernels import serve
from dtgpt.inference.options import Options
from dtgpt.inference.step import Step, step_kind
from dtgpt.models.batch import Batch
from dtgpt.models.gpt2 import GPT2Config
from tests.support import bodies_engine as bodies
from tests.support.eager_graphs import EagerGraphs
from tests.support.requests import make_request

CONFIG = GPT2Config(num_layers=2, hidden_size=32, num_heads=4, seq_length=24, vocab_size=131, init_std=0.3)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class ByModules:
    """In place of `FusedStage`: computes the rows of a decode step by the modules of a stage."""

    def __init__(self, taken, cache, stage):
        self.taken, self.cache, self.stage, self.config = taken, cache, stage, stage.config

    def __call__(self, x, rows):
        self.taken.append(len(rows.slots))
        self.cache.expect(rows)
        hooks = self.stage.head._forward_pre_hooks  # of the step, which give the head fewer rows
        kept = dict(hooks)
        hooks.clear()
        logits = self.stage(*Batch(x, positions=rows.positions[None]))
        hooks.update(kept)
        self.cache.expect(None)
        return logits


@pytest.fixture
def taken(monkeypatch):
    """The numbers of rows of the decode steps that `ByModules` ran."""
    found: list[int] = []
    monkeypatch.setattr(serve, "fuse", lambda stages, _, cache, __: [ByModules(found, cache, one) for one in stages])
    monkeypatch.setattr(serve, "next_rows", lambda slots, tokens, positions: (tokens[slots], positions[slots]))
    monkeypatch.setattr(captured, "StepGraphs", EagerGraphs)
    return found


def events_of(kinds, exact, monkeypatch):
    monkeypatch.setattr("dtgpt.inference.engine.step_kind", lambda *_: type("RankStep", (*kinds, Step), {}))
    stages, mesh = bodies.inference_stages(CONFIG, "single")
    asked = [
        make_request(ids=ids, sampling=Options(max_new_tokens=9, ends=False, seed=3), choices=2, alternatives=2)
        for ids in ([5], [5, 90, 17], list(range(15)))
    ]
    return bodies.serve(Engine(stages, mesh, CONFIG, torch.float32, 4, exact=exact), asked)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kinds", [[serve.KernelStep], [captured.CapturedStep, serve.KernelStep]], ids=len)
def test_texts_and_scores_are_those_of_the_plain_step(taken, monkeypatch, kinds, exact):
    wanted = events_of([], False, monkeypatch)
    assert not taken
    found = events_of(kinds, exact, monkeypatch)
    assert taken and bodies.texts(found) == bodies.texts(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert [[i for i, _ in row] for row in one.alternatives] == [[i for i, _ in row] for row in other.alternatives]


@pytest.mark.parametrize("device, graphs, exact, names", [
    (CPU, True, False, []), (CPU, False, False, []), (CPU, False, True, ["KernelStep"]),
    (CPU, True, True, ["KernelStep"]),
    (CUDA, False, False, ["KernelStep"]), (CUDA, True, False, ["CapturedStep", "KernelStep"]),
    (CUDA, True, True, ["CapturedStep", "KernelStep"]),
], ids=str)  # fmt: skip
def test_a_device_has_the_steps_that_serve_it(device, graphs, exact, names):
    kinds = [kind.__name__ for kind in step_kind(device, graphs, exact).__mro__]
    assert [name for name in kinds if name not in ("RankStep", "Step", "object")] == names

"""Engines of whole models in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dtgpt.config.plan import Plan
from dtgpt.inference.engine import Engine
from dtgpt.inference.request import PromptJob, SequenceUpdate
from dtgpt.models.decoder import Decoder
from dtgpt.parallel.mesh import Mesh

CPU = torch.device("cpu")


@contextmanager
def engine_of(model: Decoder, slots: int) -> Iterator[Engine]:
    """An engine that computes in fp32, for the length of the block."""
    engine = Engine([model], Mesh(Plan().for_world(1), CPU), model.config, torch.float32, slots)
    yield engine
    engine.release()


def drain(engine: Engine) -> list[SequenceUpdate]:
    """All updates until every job is finished."""
    events = []
    while engine.busy:
        events += engine.step()
    return events


def events_of(model: Decoder, request: PromptJob, slots: int = 8) -> list[SequenceUpdate]:
    """The updates of a job that is alone."""
    with engine_of(model, slots) as engine:
        engine.submit(request)
        return drain(engine)


def scores_of(events: list[SequenceUpdate]) -> list[float | None]:
    """The scores of the sequences of a search that is over."""
    return [found.score for found in events[-1].completions or []]

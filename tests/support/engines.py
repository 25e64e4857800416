"""Engines of whole models in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dtgpt.config.plan import Plan
from dtgpt.inference.engine import Engine
from dtgpt.inference.request import Event, PromptJob
from dtgpt.models.decoder import Decoder
from dtgpt.parallel.mesh import Mesh

CPU = torch.device("cpu")


@contextmanager
def engine_of(model: Decoder, slots: int) -> Iterator[Engine]:
    """An engine that computes in fp32, for the length of the block."""
    engine = Engine([model], Mesh(Plan().for_world(1), CPU), model.config, torch.float32, slots)
    yield engine
    engine.release()


def drain(engine: Engine) -> list[Event]:
    """All events until every request is finished."""
    events = []
    while engine.busy:
        events += engine.step()
    return events


def events_of(model: Decoder, request: PromptJob, slots: int = 8) -> list[Event]:
    """The events of a request that is alone."""
    with engine_of(model, slots) as engine:
        engine.submit(request)
        return drain(engine)

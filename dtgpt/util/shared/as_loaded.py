"""Computing, within training, as a model does that is loaded from a checkpoint."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtgpt.train.trainer import Trainer


@contextmanager
def as_loaded(trainer: "Trainer") -> Iterator[None]:
    """Compute, while the context lasts, as a model does that is loaded from a checkpoint."""
    with ExitStack() as stack:
        for state in trainer.optimizer.states:
            stack.enter_context(state.as_loaded())
        yield

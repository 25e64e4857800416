"""A rehearsal of the first step.

A step meets its kernels one after the other, and waits until each is compiled: a dozen seconds on one core of a machine
with many. So a forward and backward pass of one block of each kind and of both ends of the model runs before it, which
launches none of them, and gives each that it meets to a thread to compile. What the pass computes is not used, and
nothing is changed by it: gradients go to nobody.
"""

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

from dtgpt.config.sections import LogConfig
from dtgpt.models.decoder import Decoder
from dtgpt.train.objective import LanguageModel
from dtgpt.train.observer import Observer
from dtgpt.util.shared.gpu_limits import TRITON

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtgpt.train.trainer import Trainer


def observe(log: LogConfig, steps: int) -> Observer:
    """Return the observer of a run."""
    return Rehearsal()


class Rehearsal(Observer):
    """Compiles the kernels of a pass, where one process runs it by itself."""

    def prepare(self, trainer: "Trainer") -> None:
        if not is_rehearsed(trainer):
            return
        from dtgpt.ops.kernels.side_by_side import compiling  # needs Triton

        # A kernel that fails here fails again in the step, which says why.
        with suppress(RuntimeError, ValueError, TypeError, AttributeError), compiling(trainer.mesh.device):
            rehearse(trainer)


def is_rehearsed(trainer: "Trainer") -> bool:
    """Return whether a pass has no messages, no state of its own, and kernels that are not compiled otherwise."""
    settings = trainer.settings
    plan = settings.plan
    alone = plan.tp == plan.cp == plan.pp == plan.ep == 1 and not plan.zero
    plain = type(trainer.objective) is LanguageModel and settings.products is None and not settings.freezes_weights
    return TRITON and settings.device.type == "cuda" and alone and plain and not settings.compile


def rehearse(trainer: "Trainer") -> None:
    """Run a micro-batch forward and backward through a part of the model."""
    (model,) = trainer.stages
    batch = trainer.batch(trainer.step).chunk(trainer.micro_batches)[0]
    with of_each_kind(model):
        loss = model(*batch)
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)


@contextmanager
def of_each_kind(model: Decoder) -> "Iterator[None]":
    """Leave one block of each kind to the model while the context lasts."""
    whole, examples = model.blocks, {str(index) for index in model.inventory.examples}
    model.blocks = torch.nn.ModuleDict({index: whole[index] for index in whole if index in examples})
    try:
        yield
    finally:
        model.blocks = whole

"""The first step of one process in float64, which tells how far from exact a run is.

The loss is the model's own, or the objective's: a head may compute another one than cross-entropy, and is held against
itself. So that it is in float64, too, where it widens logits by `.float()`, such a cast gives float64 while the head
computes. An `Output` computes the loss by its definition instead, with PyTorch's own functions and autograd, so that a
fault of the fused loss, or of the weights that a `CoupledLoss` gives, is no part of what it is held against. The weight
of a micro-batch multiplies the loss from outside, so that a head is held against what it should do with it.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dtgpt.compare.rounding import comparable
from dtgpt.compare.trace import Key, Recorder, file_of, save
from dtgpt.models.batch import Batch
from dtgpt.models.binding import bind, bound_of
from dtgpt.models.decoder import Decoder, unique_parameters
from dtgpt.models.layers import AttentionCore, LossWeights, Output
from dtgpt.models.shared.coupled import CoupledLoss, OutputLoss, coupled_of
from dtgpt.ops.loss.cross_entropy import weighted
from dtgpt.parallel.build import add_trained
from dtgpt.train.trainer import Trainer
from dtgpt.util.shared.environment import usable_cores

BIT = 2.0**-40  # by which weights are moved to see what a change does: more than float64 rounds, less than any run
NARROWER = (torch.float32, torch.bfloat16, torch.float16)
CASTS = (Tensor.float, Tensor.bfloat16, Tensor.half)
OPERATIONS = 2e12  # of a step in float64 at most; a longer one computes the first sample alone


def trace_in_float64(
    trainer: Trainer, file: Path, moved: bool = False, prepare: Callable[[Decoder], None] = lambda model: None
) -> None:
    """Compute the first step of a trainer of one process, at its initial weights, in float64 on the CPU, and write what
    modules compute, and the gradients of parameters where the whole batch is computed, to `file` and the word
    "float64". moved: whether the weights are moved by `BIT` first, and "moved" is the word. prepare: gives the model
    what modules of the trainer have beside their weights."""
    with idle_cores(trainer.mesh.device):
        _trace(trainer, file, moved, prepare)


@contextmanager
def idle_cores(device: torch.device) -> Iterator[None]:
    """Compute with as many threads as there are cores while a GPU waits: a process of a run has one otherwise."""
    threads = torch.get_num_threads()
    if device.type == "cuda":
        torch.set_num_threads(usable_cores())
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _trace(trainer: Trainer, file: Path, moved: bool, prepare: Callable[[Decoder], None]) -> None:
    settings, device = trainer.settings, torch.device("cpu")
    with torch.device("meta"):
        model = Decoder(settings.model, torch.float64)
    if settings.freezes_weights:
        add_trained(model, settings, trainer.mesh.place, device)
    model.to(torch.float64).allocate(device)
    values = {shard.name: shard.local for shard in (*trainer.shards, *(trainer.shards.frozen or ()))}
    parameters = unique_parameters(model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
        if moved:
            move([each for each in parameters.values() if each.is_floating_point()], BIT)
    compute_loss_exactly(model, trainer)
    for module in model.modules():
        if isinstance(module, AttentionCore):
            bind(module, backend="explicit")
    prepare(model)
    trainer.expect_batch()
    batch = trainer.batch(0)
    pieces = Batch._make(None if value is None else value.cpu() for value in batch).chunk(trainer.micro_batches)
    whole = 6 * sum(p.numel() for p in parameters.values()) * batch.tokens.numel() <= OPERATIONS
    recorder = Recorder()
    weight = trainer.optimizer.gradient_scale.item()
    for piece in pieces if whole else pieces[:1]:
        some = piece if whole else Batch._make(None if value is None else value[:1] for value in piece)
        with recorder.attached([model]):
            loss = model(*some) * (len(some.tokens) / len(piece.tokens))  # its part of the mean over the micro-batch
        (loss * weight).backward()
        # The weight is here in the gradients of losses, and in a run only in what they are made of.
        recorder.drop_scalars("gradient" if whole else "activation", "gradient")
    if whole:
        unscale = float(trainer.optimizer.inverse_scale())
        for name, parameter in parameters.items():
            if not parameter.requires_grad:
                continue
            assert parameter.grad is not None
            recorder.tensors[Key(0, "parameter", name)] = comparable(settings.model, name, parameter.grad * unscale)
    save(recorder, file_of(file, "moved" if moved else "float64"), rank=0, tp=0, eps=torch.finfo(torch.float64).eps)


def compute_loss_exactly(model: Decoder, trainer: Trainer) -> None:
    """Let the head compute its loss in float64, and each output layer by the definition, with the objective's loss."""
    losses = (bound_of(module).loss for stage in trainer.stages for module in stage.modules())
    loss = next((loss for loss in losses if loss is not None), None)
    assert model.head is not None
    bind(model.head, run=in_float64(model.head.compute))
    for module in model.modules():
        if type(module) is Output:  # and no kind of it that somebody wrote, whose loss is its own
            module.__class__ = ExactOutput
            bind(module, loss=OutputLoss(on_cpu(loss.coupled)) if isinstance(loss, OutputLoss) else loss)


class ExactOutput(Output):
    """An output layer whose loss is that of its definition."""

    def forward(self, x: Tensor, targets: Tensor | None = None, loss_weights: LossWeights = None) -> Tensor:
        loss = self.bound.loss
        if targets is None or not isinstance(loss, OutputLoss | None):  # another loss computes itself
            return super().forward(x, targets, loss_weights)
        logits = super().forward(x)[..., : self.vocab_size].flatten(0, -2)
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)
        if loss is None:
            assert not isinstance(loss_weights, tuple)
            return weighted(losses, loss_weights).mean()
        made = loss.coupled(losses, coupled_of(loss_weights))
        assert not isinstance(made, Tensor)  # which is what evaluation gets
        value, weights = made
        if value.requires_grad:  # the gradient of the loss itself, which the weights should have
            return value
        mean = (losses * weights).mean()
        return mean + (value - mean).detach()


def on_cpu(coupled: CoupledLoss) -> CoupledLoss:
    """Return a copy of a loss whose tensors are its own: it may count what it is given."""
    twin = copy.copy(coupled)
    if twin is not coupled:  # as a function is
        vars(twin).update({k: v.to("cpu", copy=True) for k, v in vars(twin).items() if isinstance(v, Tensor)})
    return twin


def in_float64(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same computation, with float64 wherever it asks for a narrower type."""

    def run(*inputs: Any, **named: Any) -> Any:
        with _Float64():
            return compute(*inputs, **named)

    return run


class _Float64(TorchFunctionMode):
    """Gives float64 for a narrower type of floating-point numbers."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in CASTS:
            return args[0].double()
        return function(*map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROWER else value


@torch.no_grad()
def move(weights: Iterable[Tensor], bit: float, seed: int = 0) -> None:
    """Add to each weight, or subtract from it, this fraction of it: half of them each."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        up = torch.rand(weight.shape, generator=generator) < 0.5
        weight.mul_(torch.where(up, 1 + bit, 1 - bit).to(weight.device))

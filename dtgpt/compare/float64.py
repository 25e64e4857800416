"""The first step of one process in float64, which tells how far from exact a run is."""

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.compare.rounding import comparable
from dtgpt.compare.trace import Key, Recorder, file_of, save
from dtgpt.models.batch import Batch
from dtgpt.models.binding import bind
from dtgpt.models.decoder import Decoder, unique_parameters
from dtgpt.models.layers import AttentionCore, Output
from dtgpt.train.trainer import Trainer
from dtgpt.util import seams

BIT = 2.0**-40  # by which weights are moved to see what a change does: more than float64 rounds, less than any run
OPERATIONS = 2e12  # of a step in float64 at most; a longer one computes the first sample alone


def trace_in_float64(trainer: Trainer, file: Path, moved: bool = False) -> None:
    """Compute the first step of a trainer of one process, at its initial weights, in float64 on the CPU, and write what
    modules compute, and the gradients of parameters where the whole batch is computed, to `file` and the word
    "float64". moved: whether the weights are moved by `BIT` first, and "moved" is the word."""
    settings, device = trainer.settings, torch.device("cpu")
    with torch.device("meta"):
        model = Decoder(settings.model, torch.float64)
    if settings.freezes_weights:
        for add_modules in seams.listed("added_modules"):
            add_modules(model, settings, trainer.mesh.place, device)
    model.to(torch.float64).allocate(device)
    values = {shard.name: shard.local for shard in (*trainer.shards, *(trainer.shards.frozen or ()))}
    parameters = unique_parameters(model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
        if moved:
            move(parameters.values(), BIT)
    output = next(module for module in model.modules() if isinstance(module, Output))
    name = next(name for name, module in model.named_modules() if module is output)
    for module in model.modules():
        if isinstance(module, AttentionCore):
            bind(module, backend="explicit")
    trainer.expect_batch()
    batch = trainer.batch(0)
    pieces = Batch._make(None if value is None else value.cpu() for value in batch).chunk(trainer.micro_batches)
    whole = 6 * sum(p.numel() for p in parameters.values()) * batch.tokens.numel() <= OPERATIONS
    recorder = Recorder()
    weight = trainer.optimizer.gradient_scale.item()
    for index, piece in enumerate(pieces if whole else pieces[:1]):
        some = piece if whole else Batch._make(None if value is None else value[:1] for value in piece)
        with recorder.attached([model]):
            logits = model(*some._replace(targets=None, loss_weights=None, by_token=None, by_sample=None))
            assert some.targets is not None
            losses = F.cross_entropy(
                logits[..., : output.vocab_size].flatten(0, -2), some.targets.flatten(), reduction="none"
            )
            addends = trainer.objective.addends(losses.view_as(some.targets), some)
            loss = addends.sum() / (addends.numel() * len(piece.tokens) // len(some.tokens))
        made = f"{name} output 0"
        recorder.tensors = {key: value for key, value in recorder.tensors.items() if key[0] != index or key[2] != made}
        if whole:
            recorder.keep("activation", made, loss, index)
        (loss * weight).backward()
        recorder.tensors.pop(Key(index, "gradient", made), None)
    if whole:
        unscale = float(trainer.optimizer.inverse_scale())
        for name, parameter in parameters.items():
            if not parameter.requires_grad:
                continue
            assert parameter.grad is not None
            recorder.tensors[Key(0, "parameter", name)] = comparable(settings.model, name, parameter.grad * unscale)
    save(recorder, file_of(file, "moved" if moved else "float64"), rank=0, tp=0, eps=torch.finfo(torch.float64).eps)


@torch.no_grad()
def move(weights: Iterable[Tensor], bit: float, seed: int = 0) -> None:
    """Add to each weight, or subtract from it, this fraction of it: half of them each."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        up = torch.rand(weight.shape, generator=generator) < 0.5
        weight.mul_(torch.where(up, 1 + bit, 1 - bit).to(weight.device))

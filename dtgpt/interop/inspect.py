"""Describe and verify models for `dtgpt inspect`, without a GPU."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from dtgpt.checkpoint.load import Saved
from dtgpt.checkpoint.manifest import STATE, Checkpoint, list_checkpoints
from dtgpt.checkpoint.shard_file import Damaged
from dtgpt.interop.open import open_source
from dtgpt.models.source import Source, has_vocabulary, parameter_shapes
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError

VERIFIED = "  every file is as it was written"


def inspect(path: Path, tensors: bool = False) -> str:
    """Describe a run folder, a checkpoint or a model of another library, and verify each file of a checkpoint.

    tensors: list every parameter with its shape and the SHA-256 of its values.
    Raises UserError if there is no model, or only damaged ones.
    """
    lines: list[str] = []
    if (path / "recipe.json").is_file():
        found = list_checkpoints(path / "checkpoints")
        if not found:
            raise UserError(f"{path} has no checkpoint yet; train on, or give another path")
        opened = {folder: _open(folder) for folder in found}
        lines = [f"run {path}: {counted(len(found), 'checkpoint')}"]
        lines += [_one_line(folder, *result) for folder, result in opened.items()]
        whole = [checkpoint for checkpoint, problem in opened.values() if checkpoint and not problem]
        if not whole:
            raise UserError("; ".join([*lines, "every checkpoint is damaged: restore one"]))
        source: Source = Saved(whole[-1])
        lines += [*_checkpoint(whole[-1]), VERIFIED]
    elif (path / STATE).is_file():
        checkpoint, problem = _open(path)
        if checkpoint is None or problem:
            raise UserError(f"{problem}; restore the file, or give another checkpoint")
        source = Saved(checkpoint)
        lines = [*_checkpoint(checkpoint), VERIFIED]
    else:
        source = open_source(path)
        lines = [f"{type(source).__name__} model {path}", *_model(source), *source.notes]
    if tensors:
        lines += list(_tensors(source))
    return "\n".join(lines)


def _open(folder: Path) -> tuple[Checkpoint | None, str | None]:
    """Return the checkpoint in `folder`, None if it cannot be opened, and what is wrong with it, None if nothing is."""
    try:
        checkpoint = Checkpoint(folder)
        return checkpoint, checkpoint.problem()
    except Damaged as damage:
        return None, str(damage)


def _one_line(folder: Path, checkpoint: Checkpoint | None, problem: str | None) -> str:
    size = f"{_size(checkpoint)}, " if checkpoint else ""
    return f"  {folder.name}: {size}{problem or 'every file as it was written'}"


def _checkpoint(checkpoint: Checkpoint) -> Iterator[str]:
    state = checkpoint.state
    yield f"checkpoint {checkpoint.folder}: {_size(checkpoint)}"
    yield f"  step {state['step']}, {state['consumed_samples']:,} samples, {state['tokens']:,} tokens seen"
    if "plan" in state:
        yield f"  written by the plan {state['plan']} on {counted(state['world'], 'process', 'processes')}"
    if "origin" in state:
        yield f"  weights of {state['origin']}"
    if "loss_scale" in state:
        yield f"  loss scale {state['loss_scale']['scale']:g}, {state['loss_scale']['skipped']} skipped steps"
    yield from _model(Saved(checkpoint))
    yield f"  {'weights and optimizer' if checkpoint.has_optimizer else 'weights alone'}, " + ", ".join(
        f"{name} {version}" for name, version in state["versions"].items() if name in ("dtgpt", "torch")
    )
    for name, file in sorted(checkpoint.files.items()):
        yield f"  {file.sha256}  {name}  {file.num_bytes:,} bytes"


def _model(source: Source) -> Iterator[str]:
    config = source.config
    shape = ", ".join(f"{name} {value}" for name, value in asdict(config).items() if name != "init_std")
    yield f"  {config.num_parameters:,} parameters: {shape}; table of {config.padded_vocab_size} rows"


def _tensors(source: Source) -> Iterator[str]:
    for name in parameter_shapes(source.config):
        values = source.read(name)
        if has_vocabulary(
            name, source.config
        ):  # without the padding, whose values are arbitrary, and which not every format has
            values = values[: source.config.vocab_size]
        digest = hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()
        yield f"  {digest}  {name} {list(values.shape)}"


def _size(checkpoint: Checkpoint) -> str:
    return f"{sum(file.num_bytes for file in checkpoint.files.values()) / 2**20:,.1f} MiB"

"""Describe and verify models for `dtgpt inspect`, without a GPU."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from dtgpt.checkpoint.load import Saved
from dtgpt.checkpoint.manifest import STATE, Checkpoint, list_checkpoints
from dtgpt.checkpoint.open import check_recipe, ends_of, open_source, tokenizer_beside
from dtgpt.checkpoint.shard_file import Damaged
from dtgpt.interop.foreign import Watched
from dtgpt.models.config import ModelConfig
from dtgpt.models.shared.foreign import has_vocabulary
from dtgpt.models.source import Source, parameter_shapes
from dtgpt.posttrain.lora.checkpoint import ADAPTER, base_of
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError

WHOLE = "every file verified"


def inspect(path: Path, tensors: bool = False, own: type[ModelConfig] | None = None) -> str:
    """Describe a run folder, a checkpoint or a model of another library, and verify each file of a checkpoint.

    own: as of `open_source`. tensors: list every parameter with its shape and the SHA-256 of its values. Those that are
    not finite are named in any case.
    Raises UserError if there is no model, or only damaged ones.
    """
    is_run = (path / "recipe.json").is_file()
    if not is_run and not (path / STATE).is_file():
        source = open_source(path, own=own)
        lines = [f"{type(source).__name__} model {path}", *_model(source), *_ends(path, source), *source.notes]
    else:
        folders = list_checkpoints(path / "checkpoints") if is_run else [path]
        if not folders:
            raise UserError(f"{path} has no checkpoint yet; train on, or give another path")
        opened = {folder: _open(folder, own) for folder in folders}
        lines = [f"run {path}: {counted(len(folders), 'checkpoint')}"]
        lines += [f"  {folder.name}: {size}{problem or WHOLE}" for folder, (_, size, problem) in opened.items()]
        whole = [checkpoint for checkpoint, _, problem in opened.values() if checkpoint and not problem]
        if not whole and is_run:
            raise UserError("; ".join([*lines, "every checkpoint is damaged: restore one"]))
        if not whole:
            raise UserError(f"{opened[path][2]}; restore the file, or give another checkpoint")
        source = _model_of(whole[-1], lines if is_run else [f"{path}: {WHOLE}"], own)
        lines = [*(lines if is_run else []), *_checkpoint(whole[-1], source), f"  {WHOLE}"]
    check_recipe(path, source.config, own)
    watched = Watched(source)
    listed = [f"  {digest}  {name} {shape}" for name, shape, digest in tensor_digests(watched)] if tensors else []
    if not tensors:
        for name in parameter_shapes(source.config):
            watched.read(name)
    found = [f"  {watched.problem}: start from an earlier checkpoint"] if watched.problem else []
    return "\n".join([*lines, *found, *listed])


def _open(folder: Path, own: type[ModelConfig] | None) -> tuple[Checkpoint | None, str, str | None]:
    """Return the checkpoint in `folder`, None where it cannot be opened; its size; what is wrong with it, if any."""
    try:
        checkpoint = Checkpoint(folder, own=own)
        return checkpoint, f"{_size(checkpoint)}, ", checkpoint.problem()
    except Damaged as damage:
        return None, "", str(damage)


def _model_of(checkpoint: Checkpoint, verified: list[str], own: type[ModelConfig] | None) -> Source:
    """Return the model of a checkpoint. Raises UserError, with what was verified, where adapters miss their base."""
    if base_of(checkpoint) is None:
        return Saved(checkpoint)
    try:
        return open_source(checkpoint.folder, own=own)
    except UserError as error:
        raise UserError("; ".join([*verified, str(error)])) from None


def _checkpoint(checkpoint: Checkpoint, source: Source) -> Iterator[str]:
    state = checkpoint.state
    yield f"checkpoint {checkpoint.folder}: {_size(checkpoint)}"
    yield f"  step {state['step']}, {state['consumed_samples']:,} samples, {state['tokens']:,} tokens seen"
    if "plan" in state:
        yield f"  written by the plan {state['plan']} on {counted(state['world'], 'process', 'processes')}"
    if "origin" in state:
        yield f"  weights of {state['origin']}"
    if "loss_scale" in state:
        yield f"  loss scale {state['loss_scale']['scale']:g}, {state['loss_scale']['skipped']} skipped steps"
    if (base := base_of(checkpoint)) is not None:
        yield f"  adapters of rank {checkpoint.state[ADAPTER]['rank']}, merged here into {base}"
    yield from _model(source)
    yield from _ends(checkpoint.folder, source)
    yield f"  {'weights and optimizer' if checkpoint.has_optimizer else 'weights alone'}, " + ", ".join(
        f"{name} {version}" for name, version in state["versions"].items() if name in ("dtgpt", "torch")
    )
    for name, file in sorted(checkpoint.files.items()):
        yield f"  {file.sha256}  {name}  {file.num_bytes:,} bytes"


def _model(source: Source) -> Iterator[str]:
    config = source.config
    shape = ", ".join(f"{name} {value}" for name, value in asdict(config).items() if name != "init_std")
    yield f"  {config.num_parameters:,} parameters: {shape}; table of {config.padded_vocab_size} rows"


def _ends(path: Path, source: Source) -> Iterator[str]:
    """Say where texts of the model at `path` end."""
    tokenizer = None
    try:
        tokenizer = tokenizer_beside(path)
    except UserError as error:
        yield f"  its tokenizer cannot be used: {error}"
    ends = ends_of(path, tokenizer, source.config.vocab_size)
    known = tokenizer.vocab_size if tokenizer is not None and tokenizer.spells else 0
    names = {i: f"{i} {tokenizer.decode([i])}" for i in ends.ids if tokenizer is not None and i < known}
    told = ", ".join(names.get(i, str(i)) for i in ends.ids)
    if told:
        yield f"  texts end at {told} (by {ends.source})"
    if ends.ignored:
        yield f"  not tokens of the model, but named as such: {', '.join(map(str, ends.ignored))}"


def tensor_digests(source: Source) -> Iterator[tuple[str, list[int], str]]:
    """Yield name, shape and the SHA-256 of the fp32 values of each parameter; the file's format makes no
    difference. The padding of a token table is left out: its values are arbitrary, and not every format has it."""
    for name in parameter_shapes(source.config):
        values = source.read(name)
        if has_vocabulary(name, source.config):
            values = values[: source.config.vocab_size]
        yield name, list(values.shape), hashlib.sha256(values.contiguous().numpy().data).hexdigest()


def model_digest(source: Source) -> str:
    """Return the SHA-256 of what `tensor_digests` yields, a line each: the same for equal weights in every format."""
    digest = hashlib.sha256()
    for name, shape, own in tensor_digests(source):
        digest.update(f"{own}  {name} {shape}\n".encode())
    return digest.hexdigest()


def _size(checkpoint: Checkpoint) -> str:
    return f"{sum(file.num_bytes for file in checkpoint.files.values()) / 2**20:,.1f} MiB"

"""Checkpoints of adapters alone, and a model with an adapter merged into its weights.

`state.json` names the model for which an adapter was trained, its base, by path and by a fingerprint of its weights: no
other model takes the adapter.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dtgpt.checkpoint.load import read_part
from dtgpt.checkpoint.manifest import Checkpoint
from dtgpt.checkpoint.shard_file import Damaged
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import inventory
from dtgpt.models.source import Ranges, Source
from dtgpt.parallel.layout import slices
from dtgpt.posttrain.lora.adapters import adapted, matrix_of_rows, names_of, shapes_of, spread
from dtgpt.posttrain.lora.config import BITS, LoraConfig
from dtgpt.posttrain.lora.four_bits import adapted_to
from dtgpt.util.errors import UserError, shown_name
from dtgpt.util.field_types import is_finite

ADAPTER = "adapter"  # key of `state.json`
VALUES = ("rank", "alpha", "targets", "bits")  # of the options, as `state.json` has them
MAY_DIFFER = ("seq_length", "dropout", "init_std")  # of a base: fields that change no weight


def fingerprint(source: Source) -> str:
    """Return a digest of the model's shape and of a part of its weights: all vectors, and the first row of each matrix
    of the first and the last block."""
    config = source.config
    shape = {name: value for name, value in asdict(config).items() if name not in MAY_DIFFER}
    digest = hashlib.sha256(json.dumps([config.architecture, shape], sort_keys=True).encode())
    for parameter in inventory(config).parameters():
        if len(parameter.shape) == 1:
            part: Ranges = (range(parameter.shape[0]),)
        elif parameter.block in (0, config.num_layers - 1):
            part = (range(1), *map(range, parameter.shape[1:]))
        else:
            continue
        digest.update(source.read(parameter.name, part).contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def describe_adapter(lora: LoraConfig, base: Path, source: Source) -> dict[str, Any]:
    """Return what `state.json` says of the adapters of a run that began with the model `source` at `base`."""
    return {"base": str(base.resolve()), "fingerprint": fingerprint(source), **asdict(lora)}


def base_of(checkpoint: Checkpoint) -> Path | None:
    """Return where the base of the checkpoint's adapters was; None for a checkpoint of weights."""
    return Path(_facts(checkpoint)["base"]) if ADAPTER in checkpoint.state else None


def check_same_adapter(checkpoint: Checkpoint, wanted: Mapping[str, Any] | None) -> None:
    """Raise UserError where a run cannot go on with a checkpoint. wanted: what the run says of its adapters; None: it
    trains the weights."""
    if (ADAPTER in checkpoint.state) != (wanted is not None):
        held, trains = ("adapters", "the weights") if wanted is None else ("the weights", "adapters")
        raise UserError(
            f"{checkpoint.folder} was trained on {held}, and the recipe trains {trains}; give the --lora values that "
            f"it began with, or begin a new run: --init_from {checkpoint.folder}"
        )
    if wanted is None:
        return
    facts = _facts(checkpoint)
    differences = [f"{name} {facts[name]} there, {wanted[name]} here" for name in VALUES if facts[name] != wanted[name]]
    if differences:
        raise UserError(
            f"{checkpoint.folder} has other adapters: {'; '.join(differences)}; give the same --lora values"
        )
    check_base(checkpoint.folder, facts["base"], facts["fingerprint"], wanted["fingerprint"], Path(wanted["base"]))


def check_base(adapter: Path, base: str, saved: str, found: str, given: Path) -> None:
    """Raise UserError where the model at `given`, with the fingerprint `found`, is not the base of an adapter."""
    if saved != found:
        raise UserError(
            f"{adapter} is an adapter for another model than {given}: its base was {base}, with other weights; give "
            "that model"
        )


class Addend(Protocol):
    """An adapter as what it adds to weights."""

    def read(self, name: str, part: Ranges | None = None) -> Tensor | None:
        """Return what is added to the elements `part` of the parameter `name`, fp32 on the CPU; None: nothing."""

    def replaced(self, name: str, values: Tensor, part: Ranges | None = None) -> Tensor:
        """Return the elements `part` of the parameter `name` with those that the adapter has in their place."""
        return values


class SavedAdapter(Addend):
    """The adapters of a checkpoint: an `Addend`."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self.facts = _facts(checkpoint)
        self.lora = LoraConfig(**{name: self.facts[name] for name in VALUES})
        self.weights = {parameter.name: parameter for parameter in adapted(self.config, self.lora)}

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Return A and B of the adapter of the weight `name`, whole."""
        made = []
        shapes = shapes_of(self.weights[name], self.config, self.lora.rank)
        for tensor, shape in zip(names_of(name), shapes, strict=True):
            made.append(torch.empty(shape))
            read_part(self.checkpoint, tensor, shape, tuple(map(range, shape)), made[-1])
        return made[0], made[1]

    def read(self, name: str, part: Ranges | None = None) -> Tensor | None:
        if name not in self.weights:
            return None
        a, b = self.factors(name)
        matrices = matrix_of_rows(self.weights[name], self.config)
        if part is not None:
            *stack, rows, columns = slices(tuple(part))
            a, b, matrices = a[(*stack, slice(None), columns)], b[(*stack, rows)], matrices[rows]
        return self.lora.scale * spread(b, matrices, a.shape[-2] // self.lora.rank) @ a


class Merged(Source):
    """A model with an adapter added to its weights."""

    def __init__(self, base: Source, adapter: Addend):
        self.config, self.notes, self._base, self._adapter = base.config, base.notes, base, adapter
        self.iteration, self.consumed_samples = base.iteration, base.consumed_samples
        self.checkpoint = adapter.checkpoint if isinstance(adapter, SavedAdapter) else None

    def read(self, name: str, part: Ranges | None = None) -> Tensor:
        values, addend = self._base.read(name, part), self._adapter.read(name, part)
        return self._adapter.replaced(name, values, part) if addend is None else values + addend


def merged(base: Source, path: Path, checkpoint: Checkpoint, original: Source | None = None) -> Merged:
    """Return `base`, the model at `path`, with the adapters of a checkpoint. original: the model there, where `base` is
    a changed one. Raise UserError where the adapters are for another model."""
    adapter = SavedAdapter(checkpoint)
    check_shape(checkpoint.folder, checkpoint.config, base.config, path)
    facts = adapter.facts
    check_base(checkpoint.folder, facts["base"], facts["fingerprint"], fingerprint(original or base), path)
    return Merged(adapted_to(base, adapter.lora), adapter)


def check_shape(adapter: Path, saved: ModelConfig, config: ModelConfig, path: Path) -> None:
    """Raise UserError where a model has not the shape of an adapter's base."""
    there, here = ({n: v for n, v in asdict(one).items() if n not in MAY_DIFFER} for one in (saved, config))
    if type(saved) is not type(config) or there != here:
        raise UserError(
            f"{adapter} is an adapter for another model than {path}, which is of another shape; give the model for "
            "which it was trained"
        )


def _facts(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return what `state.json` says of the adapters. Raise Damaged where it does not say enough."""
    facts = checkpoint.state[ADAPTER]
    if isinstance(facts, dict):
        facts = {"bits": 0} | facts  # which older versions did not have
    kinds = {"base": str, "fingerprint": str, "rank": int, "alpha": float, "targets": str, "bits": int}
    said = isinstance(facts, dict) and all(type(facts.get(name)) is kind for name, kind in kinds.items())
    if not said or facts["rank"] < 1 or facts["bits"] not in BITS or not is_finite(facts["alpha"]):
        raise Damaged(checkpoint.folder, f"its {shown_name(ADAPTER)} does not name a base, a rank, alpha and targets")
    return facts

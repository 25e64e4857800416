"""What transformers calls the parameters of an architecture, how they lie there, and what its config.json says.

Many of dtgpt's matrices are several there: queries, keys and values, and the gate and the up of an MLP, are packed into
one here, by groups: a head of keys and values with its queries, a row of the gate with one of the up.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from dtgpt.interop.keys import Key, among, not_here, read_key
from dtgpt.models.config import ModelConfig
from dtgpt.models.shared.foreign import cut
from dtgpt.models.source import Ranges
from dtgpt.util.errors import UserError

# transformers' names of activations by dtgpt's, the one that is written first. Those of GELU by tanh differ in rounding
# only.
ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate"),
    "gelu": ("gelu", "gelu_python"),
    "relu2": ("relu2",),
    "relu": ("relu",),
}
UNGATED = ("relu",)  # which no gated MLP has


class Architecture:
    """One architecture, or several that lie alike. Most say what they are by these tables."""

    prefix = "model."  # of all names but that of the output projection
    buffers = re.compile(r"rotary_emb\.\w+")  # names, without `prefix`, that are left out
    names: ClassVar[Mapping[str, str]] = {}  # parts of dtgpt's names -> parts of transformers', replaced in this order
    packed: ClassVar[Mapping[str, Sequence[str]]] = {}  # what a module of dtgpt's is there, before `names` are replaced
    transposed = False  # whether matrices lie [in, out]
    of_bytes: re.Pattern[str] | None = None  # names of tensors in which several values, or a scale, are bytes
    in_fp32: re.Pattern[str] | None = None  # names of tensors that are written in fp32, whatever the others are in
    known: Sequence[str] = ()  # keys of config.json that it takes, and no other family does
    experts: str | None = None  # the module, in transformers' memory, of the stacks of a block's experts
    interleaved = False  # whether rows of gate and up alternate in it, as in dtgpt's; else gates are above ups

    def of(self, settings: Mapping[str, Any]) -> "Architecture":
        """Return by what a folder with these settings is read: another one where its tensors lie otherwise."""
        return self

    def ignored(self, config: ModelConfig) -> re.Pattern[str]:
        """Return the names, without `prefix`, of what is left out of a folder of such a model."""
        return self.buffers

    def written_type(self, plain: str, dtype: torch.dtype) -> torch.dtype:
        """Return in what a tensor is written where weights are written in `dtype`."""
        return torch.float32 if self.in_fp32 is not None and self.in_fp32.fullmatch(plain) else dtype

    def is_of_bytes(self, plain: str) -> bool:
        """Return whether the tensor of this name has bytes."""
        return self.of_bytes is not None and self.of_bytes.fullmatch(plain) is not None

    def stored_names(self, name: str, config: Any) -> list[str]:
        """Return transformers' names of dtgpt's parameter `name` of a model, without `prefix`."""
        packed = next((module for module in self.packed if f".{module}." in name), None)
        found = [name] if packed is None else [name.replace(packed, part) for part in self.packed[packed]]
        for ours, theirs in self.names.items():
            found = [each.replace(ours, theirs) for each in found]
        return found

    def rows_of_group(self, name: str, config: Any) -> list[int]:
        """Return how many rows of each stored tensor follow each other in dtgpt's."""
        return [1]

    def from_stored(self, stored: list[Tensor], name: str, config: ModelConfig, part: Ranges | None) -> Tensor:
        """Return the elements `part` of dtgpt's parameter `name`."""
        return joined(stored, self.rows_of_group(name, config), part)

    def to_stored(self, whole: Tensor, name: str, config: ModelConfig) -> list[Tensor]:
        """Return dtgpt's parameter `name` as transformers has it."""
        return separated(whole, self.rows_of_group(name, config))

    def read_config(self, settings: dict[str, Any], path: Path) -> ModelConfig:
        """Return the shape that config.json describes, with transformers' defaults. Raise UserError for options that
        dtgpt does not have."""
        raise NotImplementedError

    def write_config(self, config: Any) -> dict[str, Any]:
        """Return the fields of config.json. Raise UserError for what transformers does not have."""
        raise NotImplementedError


def joined(stored: list[Tensor], rows: Sequence[int], part: Ranges | None) -> Tensor:
    """Return the elements `part` of the packed matrix whose groups have `rows` rows of each stored one. Only the groups
    with these elements are looked at, since `stored` may be mapped from a file."""
    if len(stored) == 1:
        return cut(stored[0], part)
    size = sum(rows)
    wanted, *columns = part or tuple(map(range, (sum(map(len, stored)), *stored[0].shape[1:])))
    first, last = wanted.start // size, math.ceil(wanted.stop / size)
    groups = [
        cut(t, (range(first * n, last * n), *columns)).unflatten(0, (-1, n)) for t, n in zip(stored, rows, strict=True)
    ]
    return torch.cat(groups, dim=1).flatten(0, 1)[wanted.start - first * size : wanted.stop - first * size]


def separated(whole: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Return the matrices of which `joined` makes `whole`."""
    if len(rows) == 1:
        return [whole]
    return [part.flatten(0, 1) for part in whole.unflatten(0, (-1, sum(rows))).split(list(rows), dim=1)]


def read_activation(settings: dict[str, Any], key: str, default: str, path: Path, gated: bool = True) -> Any:
    """Return dtgpt's name of the activation under `key`. gated: of a gated MLP. Raise UserError for one that dtgpt does
    not have."""
    here = (ours for ours in ACTIVATIONS if not (gated and ours in UNGATED))
    known = {theirs: ours for ours in here for theirs in ACTIVATIONS[ours]}
    rule = Key(among(known), not_here(f"dtgpt has {', '.join(known)}"))
    return known[read_key({}, (key,), rule, path, settings.get(key, default))]


def write_activation(name: str, tanh: str = ACTIVATIONS["gelu_tanh"][0]) -> str:
    """Return transformers' name of an activation. tanh: that of GELU by tanh. Raise UserError where it has none."""
    if name not in ACTIVATIONS:
        raise UserError(
            f"this model has model.activation={name}, and transformers has {', '.join(ACTIVATIONS)} for its "
            "architecture; keep it as a checkpoint of dtgpt"
        )
    return tanh if name == "gelu_tanh" else ACTIVATIONS[name][0]

"""Models in Megatron-LM's default format `torch_dist`, read parameter by parameter, and only the parts asked for.

root/latest_checkpointed_iteration.txt      decimal
root/iter_0000100/
    .metadata  __0_0.distcp ...             a folder of torch.distributed.checkpoint
    common.pt                               args and counters; since 2026 the object `common_state` of that folder

A tensor has its whole shape under every plan: `decoder.layers.self_attention.linear_qkv.weight` of all layers
stacked, or `decoder.layers.0...` of each. SwiGLU's matrix is all gates, then all ups. Matrices of experts are stacked
behind those of layers, or have names of their own, whichever module of Megatron-LM wrote them.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtgpt.interop.distcp import METADATA, DistributedFolder
from dtgpt.interop.foreign import check_stored, check_tensors
from dtgpt.interop.megatron.architecture import Order, StoredShapes
from dtgpt.interop.megatron.config import (
    choose_architecture,
    count_layers,
    name_tensor,
    read_config,
    shift_norm,
    true_vocabulary,
)
from dtgpt.interop.megatron.experts import CORRECTION, is_left_out
from dtgpt.interop.megatron.flattened import read_as_shaped
from dtgpt.interop.megatron.names import ANGLES, is_stack, is_stacked_key, numbered_key, of_expert
from dtgpt.interop.megatron.tree import LARGEST_COUNT, consumed_samples, read_args
from dtgpt.interop.pickles import open_pickle
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Shape
from dtgpt.models.shared.foreign import has_vocabulary
from dtgpt.models.source import Ranges, Source, iterate_shapes, parameter_shapes
from dtgpt.util.errors import UserError, shown, shown_name

COMMON_FILE, COMMON_OBJECT = "common.pt", "common_state/"
OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
STACKED = re.compile(r"((?:decoder|encoder)\.layers)\.(?!\d+\.)(.+)")
HALVES = ("_w", "_v")  # of SwiGLU's matrix, which some versions store as two tensors: gates, ups


class Where(NamedTuple):
    """Tensors in the file that make one parameter, concatenated along its first dimension."""

    keys: tuple[str, ...]
    lead: tuple[int, ...]  # indices of the layer and of the expert, where they are stacked


class TorchDist(Source):
    """A checkpoint: the folder with `.metadata`. `true_vocab_size`: see `Megatron`. Raise UserError for files that are
    missing or damaged, and for a model of no known architecture."""

    def __init__(self, folder: Path, true_vocab_size: int | None = None):
        self._arguments = folder, true_vocab_size
        self.path, self.folder = folder, DistributedFolder(folder)
        self.common = _read_common(self.folder)
        iteration = self.common.get("iteration", 0)
        self.iteration = iteration if type(iteration) is int and 0 <= iteration < LARGEST_COUNT else 0
        self.args = read_args(self.common.get("args"), folder)
        self.consumed_samples = consumed_samples(self.args)
        self._given = vars(self.args) if self.args is not None else {}
        self._architecture = choose_architecture(self.args, folder)
        self._order = Order(rotary_interleaved=getattr(self.args, "rotary_interleaved", None) is True)
        self._where = self._locate()
        full, self.notes = self._read_config()
        self.num_rows = full.vocab_size
        self._check_tensors(full)
        tp = getattr(self.args, "tensor_model_parallel_size", None)
        tp = tp if type(tp) is int and 1 <= tp <= full.num_heads else 1
        vocabulary, notes = true_vocabulary(true_vocab_size, self.num_rows, self.args, tp, self._architecture)
        self.config = replace(full, vocab_size=vocabulary)
        self.notes += notes

    def __reduce__(self) -> tuple[type["TorchDist"], tuple[Path, int | None]]:
        return TorchDist, self._arguments

    def read(self, name: str, part: Ranges | None = None) -> Tensor:
        return shift_norm(self.read_as(name, part, ""), name, self.args, self.config)

    def read_as(self, name: str, part: Ranges | None, prefix: str) -> Tensor:
        """Return what the file has under `prefix` for the parameter `name`, or the elements of it with dtgpt's global
        indices `part`, in dtgpt's order: fp32 on the CPU, zeros for rows without a token."""
        if is_left_out(name, self._given):
            return torch.zeros([len(r) for r in part or map(range, parameter_shapes(self.config)[name])])
        if name not in self._where:  # a stack
            whole = range(parameter_shapes(self.config)[name][0])
            experts, inside = (whole, None) if part is None else (part[0], part[1:])
            made = [self.read_as(of_expert(name, n), inside, prefix) for n in experts or range(1)]
            return torch.stack(made)[: len(experts)]
        shape = self.shape_of(name)
        part = tuple(part if part is not None else map(range, shape))
        out = torch.zeros([len(r) for r in part])
        rows = part[0]
        if has_vocabulary(name, self.config):
            rows = range(min(rows.start, self.config.vocab_size), min(rows.stop, self.config.vocab_size))
        if rows and out.numel():
            out[: len(rows)] = self._rows_of(name, rows, part[1:], prefix)
        return out

    def shape_of(self, name: str) -> Shape:
        """Return the shape that dtgpt has for the parameter `name`."""
        shape = self.stored_shape(name)
        return (self.config.padded_vocab_size, *shape[1:]) if has_vocabulary(name, self.config) else shape

    def stored_shape(self, name: str) -> Shape:
        """Return the shape of one layer's parameter in the file, or of one expert's matrix."""
        keys, lead = self._where[name]
        shapes = [self.folder.tensors[key].shape[len(lead) :] for key in keys]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def trained_shapes(self) -> dict[str, Shape]:
        """The shapes of all weights that an optimizer moves, by the names in the file."""
        keys = (key for name, where in self._where.items() if not name.endswith(CORRECTION) for key in where.keys)
        return {key: self.folder.tensors[key].shape for key in keys}

    def _rows_of(self, name: str, rows: range, rest: Ranges, prefix: str) -> Tensor:
        """Return the rows with dtgpt's indices `rows`, which in the file may lie in several runs of rows."""
        order = torch.arange(self.stored_shape(name)[0])
        theirs = self._architecture.to_ours(order, name, self.config, self._order)[rows.start : rows.stop]
        needed = theirs.unique()  # sorted
        ends = (needed.diff() != 1).nonzero().flatten() + 1
        runs = [range(int(run[0]), int(run[-1]) + 1) for run in needed.tensor_split(ends.tolist())]
        found = torch.cat([self._run(self._where[name], run, rest, prefix) for run in runs])
        return found[torch.searchsorted(needed, theirs)]

    def _run(self, where: Where, rows: range, rest: Ranges, prefix: str) -> Tensor:
        lead = tuple(range(index, index + 1) for index in where.lead)
        found, begin = [], 0
        for key in where.keys:
            length = self.folder.tensors[key].shape[len(lead)]
            own = range(max(rows.start - begin, 0), min(rows.stop - begin, length))
            if own:
                piece = read_as_shaped(self.folder, prefix + key, self.folder.tensors[key].shape, (*lead, own, *rest))
                found.append(piece.reshape(len(own), *map(len, rest)))
            begin += length
        return torch.cat(found).float()

    def _locate(self) -> dict[str, Where]:
        """Find every parameter. Raise UserError for a tensor that the architecture does not have."""
        where: dict[str, Where] = {}
        for key, stored in self.folder.tensors.items():
            if OPTIMIZER.match(key) or ANGLES.fullmatch(key) or "_extra_state" in key:
                continue
            check_stored(key, stored.dtype, self.path)
            keys = self._halves(key)
            if not keys:
                continue
            plain = key if len(keys) == 1 else key[: -len(HALVES[0])]
            stacked, of_experts = STACKED.fullmatch(plain), is_stacked_key(plain)
            depth = bool(stacked) + of_experts
            if 0 in stored.shape or len(stored.shape) < 1 + depth:
                raise UserError(
                    f"{self.path} has {shown_name(key)} of shape {shown(list(stored.shape))}; copy it again"
                )
            for lead in product(*map(range, stored.shape[:depth])):
                whole = plain if stacked is None else f"{stacked[1]}.{lead[0]}.{stacked[2]}"
                whole = numbered_key(whole, lead[-1]) if of_experts else whole
                where[name_tensor(whole, self._architecture, where, self.path)] = Where(keys, lead)
        return where

    def _halves(self, key: str) -> tuple[str, ...]:
        """Return `key`, or the two halves whose first it is; nothing for a second half."""
        first, second = (key[: -len(end)] + end for end in HALVES)
        if key == second and first in self.folder.tensors:
            return ()
        if key == first and second in self.folder.tensors:
            a, b = (self.folder.tensors[k].shape for k in (first, second))
            if a != b:
                raise UserError(f"{self.path} has {shown_name(first)} and {shown_name(second)} of other shapes")
            return first, second
        return (key,)

    def _read_config(self) -> tuple[ModelConfig, list[str]]:
        shapes = {name: self.stored_shape(name) for name in self._where}
        untied = self.path if f"{self._architecture.MODULES['output']}.weight" in shapes else None
        facts = StoredShapes(shapes, count_layers(shapes, self.path), 1, untied, self._order, self.path)
        return read_config(self._architecture, self.args, facts)

    def _check_tensors(self, config: ModelConfig) -> None:
        check_tensors({name: self.stored_shape(name) for name in self._where}, self._expected(config), self.path)

    def _expected(self, config: ModelConfig) -> Iterator[tuple[str, Shape]]:
        """Yield names and shapes of all tensors, of stacks those of each expert."""
        for name, shape in iterate_shapes(config):
            if is_stack(name, config):
                yield from ((of_expert(name, n), shape[1:]) for n in range(shape[0]))
            elif not is_left_out(name, self._given):
                yield name, (self.num_rows, *shape[1:]) if has_vocabulary(name, config) else shape


def _read_common(folder: DistributedFolder) -> dict[str, Any]:
    """Return what all ranks had in common. Raise UserError where nothing says it."""
    name = next((name for name in folder.objects if name.startswith(COMMON_OBJECT)), None)
    if name is None:
        if not (folder.folder / COMMON_FILE).is_file():
            raise UserError(
                f"{folder.folder} has neither {COMMON_FILE} nor a common state in {METADATA}; give a checkpoint that "
                "Megatron-LM wrote in the format torch_dist"
            )
        return open_pickle(folder.folder / COMMON_FILE)
    found = folder.read_object(name)
    content = found[0] if isinstance(found, list) and found else found
    if not isinstance(content, dict):
        raise UserError(f"{folder.path} has {shown(content)} as {shown_name(name)}, not a dictionary; copy it again")
    return content

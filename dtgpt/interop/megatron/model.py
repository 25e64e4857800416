"""GPT-2 in checkpoints of Megatron-LM, of any tensor and pipeline parallel size, read parameter by parameter.

Versions 0 to 3.0 of the `torch` format, with the names of 2019 to 2024 or mcore's (`names.py`).
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dtgpt.interop.foreign import as_parameter, check_tensors, untied
from dtgpt.interop.megatron.config import (
    ZERO_CENTERED,
    read_config,
    true_vocabulary,
)
from dtgpt.interop.megatron.names import BLOCK_PARAMETERS, POSITIONS, cut_dimension, reorder_qkv
from dtgpt.interop.megatron.tree import expected_path, open_ranks
from dtgpt.models.gpt2 import TABLE, GPT2Config
from dtgpt.models.source import Part, Source, parameter_shapes
from dtgpt.util.errors import UserError, shown

COMPARED = 4096  # rows of each copy of the token table
Where = tuple[int, int, str]  # pipeline stage, chunk in it, dtgpt's name with the layer's number there


class Megatron(Source):
    """A checkpoint: its root with `latest_checkpointed_iteration.txt`, or its folder `iter_...` or `release`.

    `true_vocab_size`: tokens without padding; not given: 50257 where the table is padded from that, else all its rows.
    `iteration` is that of the training that wrote it, 0 where unknown. Raises UserError for files that are missing,
    damaged or of different models, and for a model that is not GPT-2.
    """

    def __init__(self, folder: Path, true_vocab_size: int | None = None):
        self._arguments = folder, true_vocab_size
        self._ranks = open_ranks(folder)
        self.tensor_parallel_size, self.pipeline_parallel_size = (1 + n for n in max(self._ranks))
        first = self._ranks[0, 0]
        self.iteration = first.iteration
        self._zero_centered = any(getattr(first.args, name, None) for name in ZERO_CENTERED)
        self._check_ranks()
        self._where = self._locate()
        full, self.notes = self._read_config()
        self._rows = full.vocab_size
        self._check_tensors(full)
        self.notes += self._compare_copies()
        vocabulary, notes = true_vocabulary(true_vocab_size, self._rows, first.args, self.tensor_parallel_size)
        self.config = replace(full, vocab_size=vocabulary)
        self.notes += notes

    def __reduce__(self) -> tuple[type["Megatron"], tuple[Path, int | None]]:
        return Megatron, self._arguments  # another process maps the files itself

    def read(self, name: str, part: Part | None = None) -> Tensor:
        dim = cut_dimension(name)
        pieces = [self._piece(t, name) for t in range(1 if dim is None else self.tensor_parallel_size)]
        out = as_parameter(torch.cat(pieces, dim or 0), name, self.config, part)
        if self._zero_centered and ".ln_" in f".{name}" and name.endswith(".weight"):
            out += 1  # apply_layernorm_1p trains the weight's distance from 1
        return out

    def _tensor(self, tensor_rank: int, name: str) -> Tensor:
        stage, chunk, local = self._where[name]
        return self._ranks[tensor_rank, stage].chunks[chunk][local].detach()

    def _piece(self, tensor_rank: int, name: str) -> Tensor:
        """Return one tensor-parallel rank's part of a parameter, in dtgpt's order."""
        tensor = self._tensor(tensor_rank, name)
        if ".attn.qkv." not in name:
            return tensor
        order = self._ranks[tensor_rank, self._where[name][0]].qkv_order
        return reorder_qkv(tensor, order, self.config.num_heads // self.tensor_parallel_size)

    def _check_ranks(self) -> None:
        """Raise UserError where ranks are missing or were not written together."""
        first, tp, pp = self._ranks[0, 0], self.tensor_parallel_size, self.pipeline_parallel_size
        for name, here, missing in (
            ("tensor_model_parallel_size", tp, (tp, 0)),
            ("model_parallel_size", tp, (tp, 0)),  # its name before checkpoint_version 3.0
            ("pipeline_model_parallel_size", pp, (0, pp)),
        ):
            said = getattr(first.args, name, here)
            if isinstance(said, int) and said > here:
                raise UserError(
                    f"{expected_path(first.path, missing)} is missing, as {first.path} is one of {said} such ranks; "
                    "copy the files of all ranks"
                )
            if isinstance(said, int) and said < here:
                raise UserError(
                    f"{first.path.parents[1]} has {here} ranks where {first.path} says {said}; give a folder with one "
                    "checkpoint in it"
                )
        for file in self._ranks.values():
            for what, expected in first.common.items():
                if file.common[what] != expected:
                    raise UserError(
                        f"{file.path} has {what}={shown(file.common[what])}, but {first.path} has {shown(expected)}; "
                        "give a folder with one checkpoint in it"
                    )
            if file.untied:
                raise untied(file.path)

    def _locate(self) -> dict[str, Where]:
        """Find every parameter. In an interleaved pipeline, the second chunk of each stage comes after the first
        chunks of all stages."""
        stages, chunks = range(self.pipeline_parallel_size), len(self._ranks[0, 0].chunks)
        where: dict[str, Where] = {name: (0, 0, name) for name in (TABLE, POSITIONS)}
        number = 0
        for chunk in range(chunks):
            for stage in stages:
                for local in range(self._ranks[0, stage].layers(chunk)):
                    for name in BLOCK_PARAMETERS:
                        where[f"blocks.{number}.{name}"] = stage, chunk, f"blocks.{local}.{name}"
                    number += 1
        self._num_layers = number
        for kind in ("weight", "bias"):
            where[f"head.ln_f.{kind}"] = stages[-1], chunks - 1, f"head.ln_f.{kind}"
        return where

    def _read_config(self) -> tuple[GPT2Config, list[str]]:
        first = self._ranks[0, 0]
        for name in (TABLE, POSITIONS):
            tensor = first.chunks[0].get(name)
            if tensor is None or tensor.dim() != 2:
                raise UserError(f"{first.path} has no {name} of two dimensions; give a GPT-2 with learned positions")
        config, notes = read_config(
            first.args, first.chunks[0], self._num_layers, self.tensor_parallel_size, first.path
        )
        if config.num_heads % self.tensor_parallel_size:
            raise UserError(
                f"{first.path} has {config.num_heads} heads, which {self.tensor_parallel_size} ranks cannot share; "
                "give a folder with one checkpoint in it"
            )
        return config, notes

    def _check_tensors(self, config: GPT2Config) -> None:
        """Raise UserError where a rank lacks a tensor, has one too many, or one of another shape."""
        shapes = {**parameter_shapes(config), TABLE: (self._rows, config.hidden_size)}
        expected: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {}
        for name, shape in shapes.items():
            stage, chunk, local = self._where[name]
            expected.setdefault((stage, chunk), {})[local] = self._local_shape(name, shape)
        for (_, stage), file in self._ranks.items():
            for index, tensors in enumerate(file.chunks):
                found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
                check_tensors(found, expected.get((stage, index), {}).items(), file.path)

    def _compare_copies(self) -> list[str]:
        """Return a note on the first rank whose copy of the tied table is another table."""
        for (tensor_rank, _), file in self._ranks.items():
            table = self._tensor(tensor_rank, TABLE)
            step = max(1, table.shape[0] // COMPARED)
            if not all(c.shape == table.shape and torch.equal(c[::step], table[::step]) for c in file.copies):
                return [
                    f"{file.path} has a copy of the token table that differs from the table of the first stage, with "
                    "which dtgpt computes logits; if the model's embeddings are not tied, its results will be wrong"
                ]
        return []

    def _local_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        dim = cut_dimension(name)
        return tuple(n // self.tensor_parallel_size if d == dim else n for d, n in enumerate(shape))

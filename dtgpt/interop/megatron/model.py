"""Models in checkpoints of Megatron-LM, of any tensor and pipeline parallel size, read parameter by parameter.

Versions 0 to 3.0 of the `torch` format, with the names of 2019 to 2024 or mcore's (`names.py`).
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dtgpt.interop.foreign import as_parameter, check_tensors
from dtgpt.interop.megatron.architecture import StoredShapes
from dtgpt.interop.megatron.config import read_config, shift_norm, true_vocabulary
from dtgpt.interop.megatron.names import cut_dimension
from dtgpt.interop.megatron.tree import check_places, consumed_samples, expected_path, open_ranks
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Shape, inventory
from dtgpt.models.shared.foreign import has_vocabulary
from dtgpt.models.source import Part, Source, parameter_shapes
from dtgpt.util.errors import UserError, shown
from dtgpt.util.rules import Is, Other, Rule, Rules, check_rules

COMPARED = 4096  # rows of each copy of the token table
Where = tuple[int, int, str]  # pipeline stage, chunk in it, dtgpt's name with the layer's number there


RANK_RULES: Rules = (  # of the number of ranks that the first one says, and that there are
    Rule(
        "{absent} is missing, as {path} is one of {said} such ranks; copy the files of all ranks",
        Is("said", ">", Other("here")),
    ),
    Rule(
        "{folder} has {here} ranks where {path} says {said}; give a folder with one checkpoint in it",
        Is("said", "<", Other("here")),
    ),
)


class Megatron(Source):
    """A checkpoint: its root with `latest_checkpointed_iteration.txt`, or its folder `iter_...` or `release`.

    `true_vocab_size`: tokens without padding; not given: the size of a known vocabulary where the table is padded from
    that, else all its rows. Raises UserError for files that are missing, damaged or of different models, and for a
    model of no known architecture.
    """

    def __init__(self, folder: Path, true_vocab_size: int | None = None):
        self._arguments = folder, true_vocab_size
        self._ranks = open_ranks(folder)
        self.tensor_parallel_size, self.pipeline_parallel_size = (1 + n for n in max(self._ranks))
        first = self._ranks[0, 0]
        self.iteration, self._architecture = first.iteration, first.architecture
        self.consumed_samples = consumed_samples(first.args)
        self._check_ranks()
        layers = self._locate_layers()
        full, self.notes = self._read_config(len(layers))
        self._rows = full.vocab_size
        self._where = self._locate(layers, full)
        self._check_tensors(full)
        self.notes += self._compare_copies(full.table_name)
        vocabulary, notes = true_vocabulary(
            true_vocab_size, self._rows, first.args, self.tensor_parallel_size, self._architecture
        )
        self.config = replace(full, vocab_size=vocabulary)
        self.notes += notes

    def __reduce__(self) -> tuple[type["Megatron"], tuple[Path, int | None]]:
        return Megatron, self._arguments  # another process maps the files itself

    def read(self, name: str, part: Part | None = None) -> Tensor:
        dim = cut_dimension(name, self.config)
        pieces = [self._piece(t, name) for t in range(1 if dim is None else self.tensor_parallel_size)]
        out = as_parameter(torch.cat(pieces, dim or 0), name, self.config, part)
        return shift_norm(out, name, self._ranks[0, 0].args, self.config)

    def _tensor(self, tensor_rank: int, name: str) -> Tensor:
        stage, chunk, local = self._where[name]
        file = self._ranks[tensor_rank, stage]
        return file.checksums.check(file.chunks[chunk][local]).detach()

    def _piece(self, tensor_rank: int, name: str) -> Tensor:
        """Return one tensor-parallel rank's part of a parameter, in dtgpt's order."""
        order = self._ranks[tensor_rank, self._where[name][0]].order
        return self._architecture.to_ours(self._tensor(tensor_rank, name), name, self.config, order)

    def _check_ranks(self) -> None:
        """Raise UserError where ranks are missing or were not written together."""
        first, tp, pp = self._ranks[0, 0], self.tensor_parallel_size, self.pipeline_parallel_size
        for name, here, missing in (
            ("tensor_model_parallel_size", tp, (tp, 0)),
            ("model_parallel_size", tp, (tp, 0)),  # its name before checkpoint_version 3.0
            ("pipeline_model_parallel_size", pp, (0, pp)),
        ):
            said, absent = getattr(first.args, name, here), expected_path(first.path, missing)
            if isinstance(said, int):
                values = {"said": said, "here": here, "path": first.path, "absent": absent}
                check_rules(RANK_RULES, values, folder=first.path.parents[1])
        for file in self._ranks.values():
            for what, expected in first.common.items():
                if file.common[what] != expected:
                    raise UserError(
                        f"{file.path} has {what}={shown(file.common[what])}, but {first.path} has {shown(expected)}; "
                        "give a folder with one checkpoint in it"
                    )
        check_places(self._ranks)

    def _locate_layers(self) -> list[tuple[int, int, int]]:
        """Return stage, chunk and number there of every layer. In an interleaved pipeline, the second chunk of each
        stage comes after the first chunks of all stages."""
        return [
            (stage, chunk, local)
            for chunk in range(len(self._ranks[0, 0].chunks))
            for stage in range(self.pipeline_parallel_size)
            for local in range(self._ranks[0, stage].layers(chunk))
        ]

    def _locate(self, layers: list[tuple[int, int, int]], config: ModelConfig) -> dict[str, Where]:
        """Find every parameter."""
        parts = inventory(config)
        where: dict[str, Where] = {p.name: (0, 0, p.name) for p in parts.of_embedding()}
        for number, (stage, chunk, local) in enumerate(layers):
            for name in parts.block(number).shapes:
                where[f"blocks.{number}.{name}"] = stage, chunk, f"blocks.{local}.{name}"
        last = self.pipeline_parallel_size - 1, len(self._ranks[0, 0].chunks) - 1
        return {p.name: (*last, p.name) for p in parts.of_head()} | where

    def _read_config(self, num_layers: int) -> tuple[ModelConfig, list[str]]:
        first = self._ranks[0, 0]
        shapes = {name: tuple(tensor.shape) for name, tensor in first.chunks[0].items()}
        untied = next((file.path for file in self._ranks.values() if file.untied), None)
        facts = StoredShapes(shapes, num_layers, self.tensor_parallel_size, untied, first.order, first.path)
        config, notes = read_config(self._architecture, first.args, facts)
        if config.num_heads % self.tensor_parallel_size:
            raise UserError(
                f"{first.path} has {config.num_heads} heads, which {self.tensor_parallel_size} ranks cannot share; "
                "give a folder with one checkpoint in it"
            )
        return config, notes

    def _check_tensors(self, config: ModelConfig) -> None:
        """Raise UserError where a rank lacks a tensor, has one too many, or one of another shape."""
        expected: dict[tuple[int, int], dict[str, Shape]] = {}
        for name, shape in parameter_shapes(config).items():
            stage, chunk, local = self._where[name]
            whole = (self._rows, *shape[1:]) if has_vocabulary(name, config) else shape
            cut = cut_dimension(name, config)
            shape_of_rank = tuple(n // self.tensor_parallel_size if dim == cut else n for dim, n in enumerate(whole))
            expected.setdefault((stage, chunk), {})[local] = shape_of_rank
        for (_, stage), file in self._ranks.items():
            for index, tensors in enumerate(file.chunks):
                found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
                check_tensors(found, expected.get((stage, index), {}).items(), file.path)

    def _compare_copies(self, table_name: str) -> list[str]:
        """Return a note on the first rank whose copy of the tied table is another table."""
        for (tensor_rank, _), file in self._ranks.items():
            table = self._tensor(tensor_rank, table_name)
            step = max(1, table.shape[0] // COMPARED)
            copies = map(file.checksums.check, file.copies)
            if not all(c.shape == table.shape and torch.equal(c[::step], table[::step]) for c in copies):
                return [
                    f"{file.path} has a copy of the token table that differs from the table of the first stage, with "
                    "which dtgpt computes logits; if the model's embeddings are not tied, its results will be wrong"
                ]
        return []

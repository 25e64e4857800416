"""Models in checkpoints of Megatron-LM, of any tensor, pipeline and expert parallel size, read parameter by parameter.

Versions 0 to 3.0 of the `torch` format, with the names of 2019 to 2024 or mcore's (`names.py`).
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dtgpt.interop.foreign import as_parameter, check_tensors
from dtgpt.interop.megatron.architecture import StoredShapes
from dtgpt.interop.megatron.config import read_config, shift_norm, true_vocabulary
from dtgpt.interop.megatron.experts import experts_of_rank, is_left_out
from dtgpt.interop.megatron.names import cut_dimension, is_stack, of_expert
from dtgpt.interop.megatron.tree import Rank, check_places, consumed_samples, expected_path, open_ranks
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Shape, inventory
from dtgpt.models.shared.foreign import has_vocabulary
from dtgpt.models.source import Ranges, Source, parameter_shapes
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
        self.tensor_parallel_size, self.pipeline_parallel_size, self.expert_parallel_size = [
            1 + number for number in max(self._ranks)
        ]
        first = self._first = self._ranks[Rank(0)]
        self._given = vars(first.args) if first.args is not None else {}
        self._local_experts = experts_of_rank(self._given)
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

    def read(self, name: str, part: Ranges | None = None) -> Tensor:
        if is_left_out(name, self._given):
            return torch.zeros([len(r) for r in part or map(range, parameter_shapes(self.config)[name])])
        if not is_stack(name, self.config):
            return shift_norm(self._joined(name, name, 0, part), name, self._first.args, self.config)
        each = self._local_experts
        whole = range(each * self.expert_parallel_size)
        experts, inside = (whole, None) if part is None else (part[0], part[1:])
        made = [  # of a rank without experts: the shape
            self._joined(name, of_expert(name, n % each), n // each, inside) for n in experts or range(1)
        ]
        return torch.stack(made)[: len(experts)]

    def _joined(self, name: str, own: str, expert_rank: int, part: Ranges | None) -> Tensor:
        """Return the parameter `name`, or one matrix of it, of which ranks have pieces under the name `own`."""
        dim = cut_dimension(name, self.config)
        ranks = range(1 if dim is None else self.tensor_parallel_size)
        pieces = [self._piece(t, name, own, expert_rank) for t in ranks]
        return as_parameter(torch.cat(pieces, dim or 0), name, self.config, part)

    def _tensor(self, tensor_rank: int, name: str, own: str, expert_rank: int = 0) -> Tensor:
        stage, chunk, local = self._where[name]
        file = self._ranks[Rank(tensor_rank, stage, expert_rank)]
        return file.checksums.check(file.chunks[chunk][local + own[len(name) :]]).detach()

    def _piece(self, tensor_rank: int, name: str, own: str, expert_rank: int) -> Tensor:
        """Return one tensor-parallel rank's part of a parameter, in dtgpt's order."""
        order = self._ranks[Rank(tensor_rank, self._where[name][0], expert_rank)].order
        return self._architecture.to_ours(self._tensor(tensor_rank, name, own, expert_rank), name, self.config, order)

    def _check_ranks(self) -> None:
        """Raise UserError where ranks are missing or were not written together."""
        first, (tp, pp, ep) = self._first, [1 + number for number in max(self._ranks)]
        for name, here, missing in (
            ("tensor_model_parallel_size", tp, Rank(tp)),
            ("model_parallel_size", tp, Rank(tp)),  # its name before checkpoint_version 3.0
            ("pipeline_model_parallel_size", pp, Rank(0, pp)),
            ("expert_model_parallel_size", ep, Rank(0, 0, ep)),
        ):
            said, absent = getattr(first.args, name, here), expected_path(first, missing)
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
            for chunk in range(len(self._first.chunks))
            for stage in range(self.pipeline_parallel_size)
            for local in range(self._ranks[Rank(0, stage)].layers(chunk))
        ]

    def _locate(self, layers: list[tuple[int, int, int]], config: ModelConfig) -> dict[str, Where]:
        """Find every parameter."""
        parts = inventory(config)
        where: dict[str, Where] = {p.name: (0, 0, p.name) for p in parts.of_embedding()}
        for number, (stage, chunk, local) in enumerate(layers):
            for name in parts.block(number).shapes:
                where[f"blocks.{number}.{name}"] = stage, chunk, f"blocks.{local}.{name}"
        last = self.pipeline_parallel_size - 1, len(self._first.chunks) - 1
        return {p.name: (*last, p.name) for p in parts.of_head()} | where

    def _read_config(self, num_layers: int) -> tuple[ModelConfig, list[str]]:
        first = self._first
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
            if is_left_out(name, self._given):
                continue
            stage, chunk, local = self._where[name]
            whole = (self._rows, *shape[1:]) if has_vocabulary(name, config) else shape
            names = [local]
            if is_stack(name, config):
                whole, names = shape[1:], [of_expert(local, n) for n in range(self._local_experts)]
            cut = cut_dimension(name, config)
            of_rank = tuple(n // self.tensor_parallel_size if dim == cut else n for dim, n in enumerate(whole))
            expected.setdefault((stage, chunk), {}).update(dict.fromkeys(names, of_rank))
        for rank, file in self._ranks.items():
            for index, tensors in enumerate(file.chunks):
                found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
                check_tensors(found, expected.get((rank.pipeline, index), {}).items(), file.path)

    def _compare_copies(self, table_name: str) -> list[str]:
        """Return a note on the first rank whose copy of the tied table is another table."""
        for rank, file in self._ranks.items():
            table = self._tensor(rank.tensor, table_name, table_name)
            step = max(1, table.shape[0] // COMPARED)
            copies = map(file.checksums.check, file.copies)
            if not all(c.shape == table.shape and torch.equal(c[::step], table[::step]) for c in copies):
                return [
                    f"{file.path} has a copy of the token table that differs from the table of the first stage, with "
                    "which dtgpt computes logits; if the model's embeddings are not tied, its results will be wrong"
                ]
        return []

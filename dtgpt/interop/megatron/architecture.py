"""What a file such as `gpt2.py` says of an architecture in Megatron-LM's checkpoints."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dtgpt.interop.keys import whole_number
from dtgpt.interop.megatron.names import Family, Modules
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Shape
from dtgpt.util.errors import UserError, shown

Values = Mapping[str, tuple[tuple[Any, ...], str]]  # name in args -> values that fit; what a model with another has


class Order(NamedTuple):
    """How one checkpoint lays out what Megatron-LM's versions and options lay out differently."""

    qkv: str | None = None  # einops pattern from a fused QKV of checkpoint_version 0 or 1 to today's; None: today's
    rotary_interleaved: bool = False  # whether rotary positions turn neighbouring columns of a head


class StoredShapes(NamedTuple):
    """The sizes of a model as its stored tensors show them, and how they are stored."""

    shapes: Mapping[str, Shape]  # of the first rank, by dtgpt's names with layers numbered from 0
    num_layers: int
    tensor_parallel_size: int
    untied: Path | None  # the file with an output layer of its own
    order: Order
    path: Path  # of the first rank


class MegatronArchitecture(Protocol):
    """One architecture: its names, the args of its models, and the order of what its ranks store."""

    TITLE: str  # in messages
    HAS: str  # what a model of this architecture consists of, in messages
    MODULES: Modules
    FAMILY: Family  # of names that are written
    VOCABULARIES: tuple[int, ...]  # known sizes, to which Megatron-LM adds rows

    VALUES: Values  # of args, that a model of this architecture has

    def lacks(self, args: Namespace) -> dict[str, str]:
        """Return what a model with these args has and this architecture has not, by the name in args, beside what
        VALUES say."""

    def read_config(self, args: Namespace | None, facts: StoredShapes) -> tuple[ModelConfig, list[str]]:
        """Return the shape of the model, whose vocabulary is all rows of the table, and notes. Raise UserError, also
        where args and tensors disagree."""

    def cut_sizes(self, config: Any, ranks: int) -> dict[str, int]:
        """Return the sizes, by the config's names, that this number of tensor-parallel ranks has to divide."""

    def check_export(self, config: Any) -> list[str]:
        """Return notes on what Megatron-LM computes differently. Raise UserError for a model that it cannot compute."""

    def write_args(self, config: Any) -> dict[str, Any]:
        """Return the args that belong to this architecture."""

    def to_ours(self, piece: Tensor, name: str, config: Any, order: Order) -> Tensor:
        """Return one tensor-parallel rank's part of dtgpt's parameter `name` in dtgpt's order. Pieces of all ranks,
        joined in the dimension `cut_dimension`, are the parameter; one piece of the whole is also a piece."""

    def to_theirs(self, piece: Tensor, name: str, config: Any) -> Tensor:
        """Return what a rank of today's Megatron-LM stores for its part of dtgpt's parameter `name`."""


def check_fields_written(config: ModelConfig, values: Mapping[str, Any], whose: str = "models here have") -> None:
    """Raise UserError for a field that has another value than the one in `values`, which Megatron-LM's tree stands
    for."""
    for name, value in values.items():
        if getattr(config, name) != value:
            raise UserError(
                f"model.{name}={getattr(config, name)} cannot be written for Megatron-LM, whose {whose} {value}; use "
                "--to hf"
            )


def check_agreement(args: Namespace, found: Mapping[str, int], path: Path) -> None:
    """Raise UserError where args do not say what was found in the tensors."""
    for name, value in found.items():
        if name == "padded_vocab_size" and getattr(args, name, None) is None:
            continue  # known only where a tokenizer was built
        if whole_number(vars(args), (name,), None, path) != value:
            raise UserError(
                f"{path} has args with {name}={shown(getattr(args, name))}, but the checkpoint's tensors have {value}; "
                "give a folder with one complete checkpoint in it"
            )

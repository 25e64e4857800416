"""The shape of a decoder-only transformer, what follows from it (parameters, FLOPs, dropout sites), and its class by
the name in a checkpoint's state.json.

What code asks of a model it asks of the config, which needs no memory, no ranks and no modules: a plan is refused,
memory is predicted and a checkpoint is checked before a model is built. A formula for each architecture would be the
obvious way to count parameters and FLOPs, and would have to be kept equal to the modules; here `inventory` counts what
the modules have. The config makes these modules, too (`make_block`), so that an architecture is a class, and no branch
anywhere. The vocabulary is padded to a multiple that no plan changes: shapes that depend on tp would have to be
converted when the plan changes.

The core's architectures are here; capabilities add others. A family is imported where a recipe or a checkpoint has a
model of it. A checkpoint names a class that is not dtgpt's, and the recipe file that brought it. Nothing executes that
file by itself: whoever opens the checkpoint gives the class, by a recipe.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from dtgpt.models.binding import BoundModule
from dtgpt.models.inventory import Shape, inventory
from dtgpt.models.roles import ROWS, Role, Roles, patterns_of, role_of
from dtgpt.util import seams
from dtgpt.util.console import listed
from dtgpt.util.errors import UserError, shown_name
from dtgpt.util.field_types import Bounds, check_fields
from dtgpt.util.rules import Is, Other, Rule, Rules

LARGEST_SIZE = 1_000_000  # of any one dimension
SIZE = Bounds(1, LARGEST_SIZE)
VOCAB_MULTIPLE = 128  # padding that does not depend on the plan, so that every plan has the same global shapes


def near_heads(config: "ModelConfig") -> str:
    """Return the numbers of heads next to that of a model, in words, over which its width can be split."""
    heads = [n for n in range(1, 2 * config.num_heads + 1) if config.hidden_size % n == 0]
    return listed(sorted(sorted(heads, key=lambda n: abs(n - config.num_heads))[:4]))


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """Fields of every architecture. A subclass names its modules in `roles` and makes them in `make_*`."""

    architecture: ClassVar[str]  # as checkpoints name it
    recipe_file: ClassVar[str | None] = None  # that brought the class, where it is not one of dtgpt's
    roles: ClassVar[Roles]
    continued: ClassVar[frozenset[str]] = frozenset()  # fields that a run may set anew on the weights of a model
    rules: ClassVar[Rules] = (  # of what values cannot be together
        Rule(
            "model.hidden_size={hidden_size} cannot be split over model.num_heads={num_heads}; use "
            "model.num_heads={remedy}, or another width",
            Is("hidden_size", "is no multiple of", Other("num_heads")),
            remedy=near_heads,
        ),
    )

    plan_rules: ClassVar[Rules] = ()  # of plans that no model of the class can have

    num_layers: Annotated[int, "number of transformer blocks", SIZE]
    hidden_size: Annotated[int, "width of the residual stream", SIZE]
    num_heads: Annotated[int, "number of attention heads", SIZE]
    seq_length: Annotated[int, "positions; also tokens of a training sample, unless --seq_length is less", SIZE] = 1024
    vocab_size: Annotated[int, "number of tokens in the vocabulary, before padding to a multiple of 128", SIZE] = 50257
    dropout: Annotated[float, "dropout of embeddings, attention and residual branches", Bounds(0, below=1)] = 0.0
    init_std: Annotated[
        float, "standard deviation of initial weights; residual outputs: / sqrt(2 num_layers)", Bounds(0, LARGEST_SIZE)
    ] = 0.02

    def validate(self) -> None:
        """Raise UserError, one sentence, if no model has this shape."""
        check_fields(self, "model.")

    @property
    @abstractmethod
    def tied(self) -> bool:
        """Whether the output projection is the token embedding."""

    @property
    def cut_by_tp(self) -> dict[str, int]:
        """The sizes, by the fields' names, that a tensor parallel degree has to divide."""
        return {"num_heads": self.num_heads}

    @abstractmethod
    def make_embedding(self, dtype: torch.dtype) -> BoundModule:
        """Return the module from tokens `[B, T]` to activations `[B, T, H]` of `dtype`."""

    @abstractmethod
    def make_block(self, index: int) -> BoundModule:
        """Return transformer block `index`, activations `[B, T, H]` to `[B, T, H]`."""

    @abstractmethod
    def make_head(self) -> BoundModule:
        """Return the module from activations `[B, T, H]` to logits `[B, T, V]`, or to a loss with targets."""

    def block_kind(self, index: int) -> Hashable:
        """Return what tells the kind of block `index`: blocks with equal kinds have the same modules and shapes. By
        default all are of one kind."""
        return None

    def initial_weight(self, name: str) -> tuple[float, float]:
        """Return (mean, standard deviation) of the initial weights of parameter `name`: zero biases, unit norms, and
        N(0, init_std), with the outputs of residual branches scaled by 1 / sqrt(2 num_layers) (Radford et al. 2019,
        section 2.3)."""
        module, _, kind = name.rpartition(".")
        role = role_of(module, self.roles)
        if kind == "bias":
            return 0.0, 0.0
        if role in (Role.NORM, Role.HEAD_NORM, Role.JOINT_NORM):
            return 1.0, 0.0
        return 0.0, self.init_std / (math.sqrt(2 * self.num_layers) if role in ROWS else 1)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def table_name(self) -> str:
        """The name of the token embedding's weight, which a tied output projection shares."""
        return f"{patterns_of(Role.VOCABULARY, self.roles)[0]}.weight"

    @property
    def output_name(self) -> str:
        """The name of the output projection's weight."""
        return f"{patterns_of(Role.OUTPUT, self.roles)[0]}.weight"

    @property
    def num_sites(self) -> int:
        """Dropout sites: those of the embedding, then those of each block."""
        return inventory(self).num_sites

    @property
    def num_parameters(self) -> int:
        return inventory(self).num_parameters

    def used_elements(self, shape: Shape, role: Role | None) -> int:
        """Return how many elements of a parameter each token meets."""
        return math.prod(shape)


FIRST = "gpt2"  # of checkpoints that name none
CORE = {"gpt2": "dtgpt.models.gpt2:GPT2Config", "llama": "dtgpt.models.llama:LlamaConfig"}
CLASS, FILE = "model_class", "recipe_file"  # keys of state.json, where the class is not dtgpt's


def architectures() -> dict[str, str]:
    """Return 'module:class' of every architecture, by name."""
    return {**CORE, **seams.added("architectures")}


def class_of(architecture: str) -> type[ModelConfig] | None:
    """Return the class of dtgpt's architecture of this name; None where there is none."""
    part = architectures().get(architecture)
    return None if part is None else seams.load(part)


def is_users(kind: type[ModelConfig]) -> bool:
    """Return whether a class is not one of dtgpt's; it may have the name of one's architecture."""
    return class_of(kind.architecture) is not kind


def describe_class(kind: type[ModelConfig]) -> dict[str, Any]:
    """Return what a checkpoint says of the class of its model."""
    if not is_users(kind):
        return {"architecture": kind.architecture}
    return {"architecture": kind.architecture, CLASS: kind.__qualname__, FILE: kind.recipe_file or ""}


def saved_class(where: object, state: Mapping[str, Any], own: type[ModelConfig] | None) -> type[ModelConfig]:
    """Return the class of the model of which a state says what `describe_class` returned. own: that of the recipe that
    was given; None without one. Raise UserError where neither dtgpt nor the recipe has the class."""
    architecture, name = state["architecture"], state.get(CLASS)
    if own is not None and is_users(own) and own.architecture == architecture and name in (None, own.__qualname__):
        return own
    if name is None and (known := class_of(architecture)) is not None:
        return known
    told = f"{where} has a model of {shown_name(name or architecture)}, which is not here; give the recipe that has it"
    raise UserError(next((explain(where, state, own) for explain in seams.listed("foreign_models")), told))

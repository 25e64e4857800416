"""Experts as transformers stores them: each has its own gate, up and down there, which are stacks of matrices here."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from dtgpt.interop.hf.architecture import joined, separated
from dtgpt.interop.hf.llama import LikeLlama
from dtgpt.interop.keys import check_aliases, whole_number
from dtgpt.models.config import ModelConfig
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.models.source import Ranges
from dtgpt.util.errors import UserError
from dtgpt.util.rules import Given, Rule, Rules

NO_WINDOWS: Rules = (  # of what is written
    Rule(
        "transformers' {architecture} has no windows, and this model has model.window={window}; keep it as a "
        "checkpoint of dtgpt",
        Given("window"),
    ),
)


class LikeMixture(LikeLlama):
    """What families have in common whose experts are stored so. stacks: what the matrices of a stack are called there;
    `{}` is the number of the expert."""

    names: ClassVar[Mapping[str, str]] = {**LikeLlama.names, "mlp.router": "mlp.gate"}
    experts = "mlp.experts"
    stacks: ClassVar[Mapping[str, Sequence[str]]] = {
        "mlp.experts.gate_up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        "mlp.experts.down": ("mlp.experts.{}.down_proj",),
    }

    def _stack_of(self, name: str) -> str | None:
        """Return which of `stacks` a parameter is; None: none of them."""
        return next((stack for stack in self.stacks if f".{stack}." in name), None)

    def rows_of_group(self, name: str, config: Any) -> list[int]:
        return [1, 1] if ".mlp.shared.gate_up." in name else super().rows_of_group(name, config)

    def stored_names(self, name: str, config: Any) -> list[str]:
        stack = self._stack_of(name)
        if stack is None:
            return super().stored_names(name, config)
        own = (name.replace(stack, each.format(n)) for n in range(config.num_experts) for each in self.stacks[stack])
        return [each.replace("blocks.", "layers.") for each in own]

    def from_stored(self, stored: list[Tensor], name: str, config: ModelConfig, part: Ranges | None) -> Tensor:
        stack = self._stack_of(name)
        if stack is None:
            return super().from_stored(stored, name, config, part)
        each = len(self.stacks[stack])  # matrices of an expert, whose rows alternate here
        experts, inside = (range(len(stored) // each), None) if part is None else (part[0], part[1:])
        own = (stored[n * each : (n + 1) * each] for n in experts or range(1))  # of a rank without experts: the shape
        made = torch.stack([joined(matrices, [1] * each, inside) for matrices in own])
        return made[: len(experts)]

    def to_stored(self, whole: Tensor, name: str, config: ModelConfig) -> list[Tensor]:
        stack = self._stack_of(name)
        if stack is None:
            return super().to_stored(whole, name, config)
        rows = [1] * len(self.stacks[stack])
        return [matrix for expert in whole for matrix in separated(expert, rows)]


def gates_first(stack: Tensor) -> Tensor:
    """Return a stack `[E, 2 F, ..]` with the rows of gates above those of ups, which alternate in the given one."""
    return stack.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def alternating(stack: Tensor) -> Tensor:
    """Return the stack of which `gates_first` makes the given one."""
    return stack.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def read_experts(settings: dict[str, Any], count: int, chosen: int, path: Path) -> dict[str, Any]:
    """Return the fields of `ExpertsConfig`. count, chosen: the defaults of the family."""
    check_aliases(settings, {"num_experts": "num_local_experts"}, path)
    return {
        "num_experts": whole_number(settings, ("num_experts", "num_local_experts"), count, path),
        "experts_per_token": whole_number(settings, ("num_experts_per_tok",), chosen, path),
    }


def write_experts(config: ExpertsConfig, name: str) -> dict[str, Any]:
    """Return the keys that `read_experts` reads. name: that of the number of experts."""
    return {name: config.num_experts, "num_experts_per_tok": config.experts_per_token}


def only_window(config: ExpertsConfig, family: str) -> int | None:
    """Return the window of all layers; None: they have none. Raise UserError where some of them have one."""
    local = {config.is_local(layer) for layer in range(config.num_layers)}
    if len(local) > 1:
        raise UserError(
            f"transformers' {family} has a window in all layers or in none, and this model has "
            f"model.window_pattern={config.window_pattern}; keep it as a checkpoint of dtgpt"
        )
    return config.window if local == {True} else None

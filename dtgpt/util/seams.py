"""The seams at which capabilities hang on the core.

The core does not import a capability. `dtgpt/capabilities.py` lists the modules that describe one, each by a
`Capability` named CAPABILITY; whoever imports `dtgpt` has them all. The core asks for what they add at a seam with
`added` and `listed`, and works the same without any.
"""

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Capability:
    """What a capability adds. Each part is 'module:object', and is imported when the core first needs it."""

    sections: Mapping[str, str] = field(default_factory=dict)  # of a recipe: the class of a field, by its name
    commands: Mapping[str, str] = field(default_factory=dict)  # `dtgpt NAME`: a `command.Command`, by its name
    architectures: Mapping[str, str] = field(default_factory=dict)  # the class of a model's config, by its name
    optimizers: Mapping[str, str] = field(default_factory=dict)  # the class of an optimizer's config, by its kind
    objectives: tuple[str, ...] = ()  # what a run learns
    step_states: tuple[str, ...] = ()  # what a step keeps for the next one: a function that makes it, or returns None
    entries: Mapping[str, str] = field(default_factory=dict)  # of a checkpoint: what checks the entry of this name
    observers: tuple[str, ...] = ()  # what happens between steps
    sources: tuple[str, ...] = ()  # weights of other libraries
    datasets: tuple[str, ...] = ()  # data that are no plain text
    tokenizers: tuple[str, ...] = ()  # tokenizers of other libraries


_modules: tuple[str, ...] = ()


def use(modules: Iterable[str]) -> None:
    """Let the core have the capabilities that `modules` describe, and no others."""
    global _modules
    _modules = tuple(modules)
    capabilities.cache_clear()


@cache
def capabilities() -> tuple[Capability, ...]:
    """Return the capabilities in use, in the order in which they were named."""
    return tuple(importlib.import_module(module).CAPABILITY for module in _modules)


def load(part: str) -> Any:
    """Return the object that 'module:object' names."""
    module, _, name = part.partition(":")
    return getattr(importlib.import_module(module), name)


def added(seam: str) -> dict[str, str]:
    """Return the parts that capabilities add at a seam, by name."""
    return {name: part for capability in capabilities() for name, part in getattr(capability, seam).items()}


def listed(seam: str) -> list[Any]:
    """Return the objects that capabilities add at a seam without names, imported."""
    return [load(part) for capability in capabilities() for part in getattr(capability, seam)]

"""The architectures that dtgpt knows, by the name in a checkpoint's state.json, and classes of users' own.

Here are the core's; capabilities add others. A family is imported where a recipe or a checkpoint has a model of it.
A checkpoint names a class that is not dtgpt's, and the recipe file that brought it. Nothing executes that file by
itself: whoever opens the checkpoint gives the class, by a recipe.
"""

import shlex
from collections.abc import Mapping
from typing import Any

from dtgpt.models.config import ModelConfig
from dtgpt.util import seams
from dtgpt.util.errors import UserError, shown_name

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


def is_own(kind: type[ModelConfig]) -> bool:
    """Return whether a class is not one of dtgpt's; it may have the name of one's architecture."""
    return class_of(kind.architecture) is not kind


def describe_class(kind: type[ModelConfig]) -> dict[str, Any]:
    """Return what a checkpoint says of the class of its model."""
    if not is_own(kind):
        return {"architecture": kind.architecture}
    return {"architecture": kind.architecture, CLASS: kind.__qualname__, FILE: kind.recipe_file or ""}


def saved_class(where: object, state: Mapping[str, Any], own: type[ModelConfig] | None) -> type[ModelConfig]:
    """Return the class of the model of which a state says what `describe_class` returned. own: that of the recipe that
    was given; None without one. Raise UserError where neither dtgpt nor the recipe has the class."""
    architecture, name = state["architecture"], state.get(CLASS)
    if own is not None and is_own(own) and own.architecture == architecture and name in (None, own.__qualname__):
        return own
    if name is None and (known := class_of(architecture)) is not None:
        return known
    file = state.get(FILE)
    file = file if file and isinstance(file, str) and file.isprintable() else "FILE.py"
    remedy = f"give the recipe file with its class: --recipe {shlex.quote(file)} (in Python: recipe={file!r})"
    if own is not None:  # by --recipe, or as the first word of `dtgpt train`
        remedy = f"give the recipe file that has the class instead: {shlex.quote(file)}"
    if name is None:
        told = f"the architecture {shown_name(architecture)}, and this dtgpt has {', '.join(architectures())}"
        remedy = f"use the dtgpt that wrote it, or {remedy}"  # of a newer dtgpt, or of a class of a user's own
    else:
        told = f"the class {shown_name(name)}, which is not dtgpt's"
    if own is not None:
        told += f", and the model of the recipe given is a {own.__qualname__}"
    raise UserError(f"{where} has a model of {told}; {remedy}")

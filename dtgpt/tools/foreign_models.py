"""What to do with a checkpoint whose model is of a class that is not dtgpt's."""

import shlex
from collections.abc import Mapping
from typing import Any

from dtgpt.models.config import CLASS, FILE, ModelConfig, architectures
from dtgpt.util.errors import shown_name


def explain(where: object, state: Mapping[str, Any], own: type[ModelConfig] | None) -> str:
    """Return what is wrong with the model of which a state tells, and what to give. own: the class of the recipe that
    was given; None without one."""
    architecture, name = state["architecture"], state.get(CLASS)
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
    return f"{where} has a model of {told}; {remedy}"

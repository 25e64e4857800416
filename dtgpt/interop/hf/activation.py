"""The names of activation functions in config.json."""

from pathlib import Path
from typing import Any

from dtgpt.util.errors import UserError, shown

# transformers' names by dtgpt's, the one that is written first. Those of GELU by tanh differ in rounding only.
NAMES = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate"),
    "gelu": ("gelu", "gelu_python"),
    "relu2": ("relu2",),
    "relu": ("relu",),
}
UNGATED = ("relu",)  # which no gated MLP has


def read_activation(settings: dict[str, Any], key: str, default: str, path: Path, gated: bool = True) -> Any:
    """Return dtgpt's name of the activation under `key`. gated: of a gated MLP. Raise UserError for one that dtgpt does
    not have."""
    value = settings.get(key, default)
    known = {theirs: ours for ours, names in NAMES.items() if not (gated and ours in UNGATED) for theirs in names}
    if not isinstance(value, str) or value not in known:
        raise UserError(f"{path} has {key}={shown(value)}; dtgpt has {', '.join(known)}: give another model")
    return known[value]


def write_activation(name: str, tanh: str = NAMES["gelu_tanh"][0]) -> str:
    """Return transformers' name of an activation. tanh: that of GELU by tanh. Raise UserError where it has none."""
    if name not in NAMES:
        raise UserError(
            f"this model has model.activation={name}, and transformers has {', '.join(NAMES)} for its architecture; "
            "keep it as a checkpoint of dtgpt"
        )
    return tanh if name == "gelu_tanh" else NAMES[name][0]

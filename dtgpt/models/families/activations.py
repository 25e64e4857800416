"""The activations of families, by name."""

from collections.abc import Callable

from torch import Tensor

from dtgpt.ops.more_activations import BIASED, GATED


def activation_of(name: str, gated: bool) -> Callable[..., Tensor]:
    """Return the function of this name."""
    return (GATED if gated else BIASED)[name]  # type: ignore[index]

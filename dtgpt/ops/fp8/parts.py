"""What ranks exchange at the outer ends of a pair of matrices: the first cut by outputs, the second alike by inputs."""

from typing import Protocol

from torch import Tensor


class Parts(Protocol):
    """Activations of which each rank has its part, or which each has whole. Neither method is differentiable."""

    def gather(self, part: Tensor) -> Tensor:
        """Return the activations `[B, T, H]` that each rank has whole, from each rank's own."""

    def sum(self, whole: Tensor) -> Tensor:
        """Return the sum of the ranks' `whole` `[B, T, H]`, of which each rank gets its own; maybe in place."""

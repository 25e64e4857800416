"""Where a matrix product is quantised, and by which scales.

A product y = x w^T has three sites: its input x, its weight w and the gradient of its output y. A value v of a site is
quantised to saturate(round(v * scale)), scale a power of two that all ranks share. Who owns the scales is
`dtgpt.optim.fp8.scales`; here is what a module sees of them.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

FORWARD = GRADIENT = torch.float8_e4m3fn  # formats of inputs and weights, and of gradients
FORMATS = {"input": FORWARD, "weight": FORWARD, "gradient": GRADIENT}  # by site, in the order of `Sites`


class Site(NamedTuple):
    """Three fp32 scalars on the device, each an element of a vector that holds those of all sites."""

    scale: Tensor
    inverse: Tensor  # 1 / scale
    amax: Tensor  # largest |v| of the step so far: what a forward or backward pass of a training step updates in place


@dataclass
class Calibration:
    """What the sites of a run share. `known` and `enabled` change between steps only."""

    known: bool = False  # whether scales follow from amaxes of earlier steps
    enabled: bool = True  # False: products are of 16 bits, and nothing is recorded
    keeps_weights: bool = False  # between forward and backward, in 8 bits: not where a plan frees weights meanwhile


@dataclass
class Sites:
    """The sites of one product."""

    input: Site
    weight: Site
    gradient: Site
    calibration: Calibration = field(default_factory=Calibration)

    @property
    def quantise(self) -> bool:
        """Whether products are of 8 bits: not before a first training step has observed the values."""
        return self.calibration.enabled and self.calibration.known

    def keeps_weight(self, x: Tensor, weight: Tensor) -> bool:
        """Whether forward makes the transposed weight for backward, too, in one pass over the weight: not where that
        would take more memory than the transposed input that forward keeps."""
        return self.calibration.keeps_weights and weight.numel() <= x.numel()

    @property
    def record(self) -> bool:
        """Whether this pass belongs to a training step, whose amaxes count: never in evaluation."""
        return self.calibration.enabled and torch.is_grad_enabled()

"""What a matrix that computes in 8 bits is bound to: a `QuantisedProduct` of `dtgpt.models.binding`."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dtgpt.ops.activations import Name, fused_name
from dtgpt.ops.fp8.linear import fp8_linear
from dtgpt.ops.fp8.mlp import fp8_mlp
from dtgpt.ops.fp8.sites import Sites
from dtgpt.ops.linear import Parts


@dataclass(frozen=True)
class Fp8Product:
    """The products of one matrix, by the scales of its sites."""

    sites: Sites

    @property
    def known(self) -> bool:
        return self.sites.quantise

    @property
    def observes(self) -> bool:
        return self.sites.record and not self.sites.quantise

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, into: Parts | None = None, out: Parts | None = None
    ) -> Tensor:
        return fp8_linear(x, weight, bias, self.sites, into, out)

    def name_of(self, activation: Callable[..., Tensor], has_bias: bool) -> Name | None:
        return fused_name(activation, has_bias)

    def mlp(
        self,
        x: Tensor,
        weight_1: Tensor,
        bias: Tensor | None,
        weight_2: Tensor,
        second: "Fp8Product",
        activation: Name,
        into: Parts | None,
        out: Parts | None,
    ) -> Tensor:
        return fp8_mlp(x, weight_1, bias, weight_2, self.sites, second.sites, activation, into, out)

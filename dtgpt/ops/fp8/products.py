"""What a matrix that computes in 8 bits is bound to: a `QuantisedProduct` of `dtgpt.models.binding`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dtgpt.ops.fp8.fused import fused_name
from dtgpt.ops.fp8.linear import fp8_linear
from dtgpt.ops.fp8.mlp import fp8_mlp
from dtgpt.ops.fp8.sites import Sites
from dtgpt.ops.local_tensors import Parts, local, on_local_tensors
from dtgpt.ops.operation import is_apart
from dtgpt.util.torch_private import is_dtensor


@dataclass(frozen=True)
class Fp8Product:
    """The products of one matrix, by the scales of its sites."""

    sites: Sites

    @property
    def known(self) -> bool:
        """Whether there are scales. Before that a step computes as without, and observes the values."""
        return self.sites.quantise

    @property
    def observes(self) -> bool:
        """Whether a pass takes the largest values, for products that are of few bits from the next step on."""
        return self.sites.record and not self.sites.quantise

    def exchanges(self, bound: Any) -> bool:
        cut = bound.into is not None or bound.out is not None
        return cut and self.known and not is_apart()

    def linear(self, bound: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.exchanges(bound) or (bound.into is not None and is_dtensor(x)):
            return on_local_tensors(self.of_tensors, x, weight, bias)
        own_bias = None if bias is None else local(bias)
        return self.of_tensors(local(x), local(weight), own_bias, bound.into, bound.out)

    def of_tensors(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, into: Parts | None = None, out: Parts | None = None
    ) -> Tensor:
        """Return x w^T + bias of local tensors. into, out: where x and the result are parts of ranks, how they lie."""
        return fp8_linear(x, weight, bias, self.sites, into, out)

    def mlp(self, x: Tensor, first: Any, second: Any, activation: Callable[..., Tensor]) -> Tensor | None:
        """Return None where the other product is not quantised, where no kernel knows the activation, and where a
        plan's own table cuts the matrices."""
        into, out = first.bound.into, second.bound.out
        whole = not is_dtensor(first.weight) and not is_dtensor(second.weight)
        fits = whole or (into is not None and out is not None)
        name = fused_name(activation, first.bias is not None)
        if second.bound.quantised is None or name is None or not fits or not self.known or is_apart():
            return None
        weights = [local(module.weight.to(x.dtype)) for module in (first, second)]
        own_bias = None if first.bias is None else local(first.bias)
        sites = self.sites, second.bound.quantised.sites
        return fp8_mlp(x, weights[0], own_bias, weights[1], *sites, name, into, out)

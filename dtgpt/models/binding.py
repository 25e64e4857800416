"""What a plan, a precision or a cache gives a module beside its parameters.

A module reads its `bound`, and does without what is None there. `bind` is the one function that writes it, so that a
model file states the computation alone and nothing is replaced from outside.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dtgpt.ops.attention.core import AttentionRule, Backend


class AttentionCache(Protocol):
    """Keys and values of earlier tokens, to which an attention core attends."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Keep k and v `[B, T, N_kv, D]`, and return the attention `[B, T, N, D]` of q over what is kept."""


class QuantisedProduct(Protocol):
    """The products of a matrix in fewer bits than its tensors have, by scales that follow from earlier steps: what a
    capability binds to it."""

    def linear(self, bound: "Binding", x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x w^T + bias. bound: of the matrix. x: whole, or this rank's where the matrix sends it."""

    def mlp(self, x: Tensor, first: Any, second: Any, activation: Callable[..., Tensor]) -> Tensor | None:
        """Return second(activation(first(x))) with few bits between the two matrices, of which this product is that of
        the first; None where they are to be computed one after the other."""

    def exchanges(self, bound: "Binding") -> bool:
        """Return whether a matrix that a plan cuts sends its activations itself, in few bits: its input or its output
        is then this rank's own."""


class Binding(NamedTuple):
    """The values that modules are given; each kind of module reads its own."""

    run: Callable[..., Any] | None = None  # of a `BoundModule`: runs in place of `compute`
    backend: Backend = "auto"  # of an attention core
    cache: AttentionCache | None = None  # of an attention core; None: the tokens of the batch attend to each other
    quantised: QuantisedProduct | None = None  # of a matrix that computes in few bits
    into: Any = None  # of a matrix that is cut by columns: what makes its input whole
    out: Any = None  # of a matrix that is cut by rows: what sums its output
    product: Callable[..., Tensor] | None = None  # of a matrix: x, weight, bias -> output; of a table: tokens, weight
    pieces: int = 0  # of what sums in pieces: those of this rank, which `product` adds in a tree; 0: it does not
    over_ranks: Callable[[Tensor], Tensor] | None = None  # for inference, of what is summed there; None: an all-reduce
    start: tuple[int, ...] | None = None  # of a dropout site that gets a shard: global index of its first element
    gradient_scale: Tensor | None = None  # of the output layer: scalar that multiplies the gradient of its loss
    loss: Callable[..., Tensor] | None = None  # of the output layer; None: the mean over tokens
    # Of the output layer, or a stack: makes its weight, or its biases, of the parameter.
    through: Callable[[Tensor], Tensor] | None = None
    use: Callable[[nn.Parameter], Tensor] | None = None  # of a stack: what it computes with in place of a parameter
    sum_of_heads: Callable[[Tensor], Tensor] | None = None  # of a norm of all heads, of which ranks have some each
    sums_over_tp: tuple[str, ...] = ()  # parameters whose gradients are addends on the tensor-parallel ranks


PLAIN = Binding()


def exchanges(bound: Binding) -> bool:
    """Return whether a matrix that a plan cuts sends its activations itself."""
    return bound.quantised is not None and bound.quantised.exchanges(bound)


def bound_of(module: nn.Module) -> Binding:
    """Return what the module is bound to, for any class of modules."""
    return getattr(module, "bound", PLAIN)


def bind(module: nn.Module, **values: Any) -> None:
    """Set these fields of the module's binding, and leave the others as they are."""
    module.bound = bound_of(module)._replace(**values)  # type: ignore[assignment]


class BoundModule(nn.Module):
    """A module whose computation a plan can wrap: to run it again in backward, or to compile it. A subclass defines
    `compute` in place of `forward`. Hooks of the module, such as those of `fully_shard`, run around what wraps it."""

    bound: Binding = PLAIN

    def compute(self, *inputs: Any, **named: Any) -> Any:
        """Return the output of the module."""
        raise NotImplementedError

    @property
    def runner(self) -> Callable[..., Any]:
        """What `forward` calls."""
        return self.bound.run or self.compute

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.runner(*inputs, **named)


@contextmanager
def on_meta() -> Iterator[None]:
    """Let modules that are made while the context lasts have shapes alone: no memory, and no initial values."""
    with torch.device("meta"), _WithoutValues():
        yield


class _WithoutValues(TorchFunctionMode):
    """Draws nothing: on the meta device, torch draws by way of its compiler, which takes a second to import."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]
        return function(*args, **kwargs)

"""Results of operations on the meta device, without what PyTorch computes there in Python: its compiler, which that
imports, takes as long to import as all else that `dtgpt plan` does. Here is what blocks of GPT-2 and LLaMA are made of,
for the inputs that they have; PyTorch gives all other results.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

SHAPELESS = {"approximate", "pin_memory"}  # arguments that no shape depends on


def result_of(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what an operation of PyTorch returns for tensors on the meta device."""
    find = RESULTS.get(operation)
    if find is None or any(kwargs[name] is not None for name in kwargs.keys() - SHAPELESS):
        return operation(*args, **kwargs)
    found = find(*args)
    return operation(*args, **kwargs) if found is None else found


def _alike(*tensors: Any) -> bool:
    """Return whether the tensors have one shape, one floating type, and elements in the order of their dimensions."""
    first = tensors[0]
    return first.is_floating_point() and all(
        each.is_meta and each.is_contiguous() and each.shape == first.shape and each.dtype == first.dtype
        for each in tensors
    )


def _elementwise(x: Tensor, *args: Any) -> Tensor | None:
    """A tensor beside the first has its shape, or that of its last dimensions, as a bias has."""
    others = [each for each in args if isinstance(each, Tensor)]
    fit = all(_alike(each) and each.dtype == x.dtype and x.shape[-each.dim() :] == each.shape for each in others)
    return x.new_empty(x.shape) if fit and _alike(x) else None


def _stack(tensors: list[Tensor], dim: int = 0) -> Tensor | None:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return tensors[0].new_empty(shape) if _alike(*tensors) else None


def _product(left: Tensor, right: Tensor) -> Tensor | None:
    if left.dtype != right.dtype or left.shape[1] != right.shape[0]:
        return None
    return left.new_empty(left.shape[0], right.shape[1])


def _product_and_sum(bias: Tensor, left: Tensor, right: Tensor, *factors: Any) -> Tensor | None:
    fits = bias.shape == right.shape[1:] and bias.dtype == left.dtype
    return _product(left, right) if fits else None


def _layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...] | None:
    if len(shape) != 1 or not _alike(x) or weight is None or bias is None or not weight.dtype == bias.dtype == x.dtype:
        return None
    mean, rstd = (x.new_empty(*x.shape[:-1], 1, dtype=torch.promote_types(x.dtype, torch.float32)) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


def _layer_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, weight: Any, bias: Any, wanted: list[bool]
) -> tuple[Tensor | None, ...] | None:
    if len(shape) != 1 or not _alike(grad, x) or weight is None or bias is None:
        return None
    given = zip((x, weight, bias), wanted, strict=True)
    return tuple(each.new_empty(each.shape) if asked else None for each, asked in given)


_ops = torch.ops.aten
RESULTS: dict[Any, Callable[..., Any]] = {
    _ops.add.Tensor: _elementwise,
    _ops.mul.Tensor: _elementwise,
    _ops.gelu.default: _elementwise,
    _ops.gelu_backward.default: _elementwise,
    _ops.empty_like.default: _elementwise,
    _ops.stack.default: _stack,
    _ops.mm.default: _product,
    _ops.addmm.default: _product_and_sum,
    _ops.native_layer_norm.default: _layer_norm,
    _ops.native_layer_norm_backward.default: _layer_norm_backward,
}

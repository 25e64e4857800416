"""Matrix products of PyTorch, computed by searched algorithms of cuBLASLt while a context lasts.

The context sees the products that reach the device: those of plain tensors, those that DTensor and `fully_shard` make
of local tensors, and those of backward, whichever module or function asked for them. The other products remain
PyTorch's: those for which no algorithm is known, of few operations, of fp32, of operands with gaps in both directions.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtgpt.ops.matmul.cublaslt import ALIGNMENT, Algorithm, Operand, Operands, Problem, Product, Run

aten = torch.ops.aten
DEVICES = ("cuda",)
DTYPES = (torch.bfloat16, torch.float16)  # of results
FEWEST_FLOPS = 4e9  # of a product that is worth a search: 5 microseconds on an H200


class Call(NamedTuple):
    """A product that PyTorch is asked for; `out` None: in new memory of `dtype`."""

    a: Tensor
    b: Tensor
    out: Tensor | None
    dtype: torch.dtype
    bias: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    fast: bool = False

    def operands(self) -> Operands:
        out = self.a.new_empty(len(self.a), self.b.shape[1], dtype=self.dtype) if self.out is None else self.out
        return Operands(self.a, self.b, out, self.bias, self.scale_a, self.scale_b)


class SearchedProducts(TorchDispatchMode):
    """A context that runs products by the algorithms that `use` has named, and records problems that it has not named
    in `unknown`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.unknown: set[Problem] = set()
        self._runs: dict[Problem, Run | None] = {}

    def use(self, algorithms: Mapping[Problem, Algorithm | None]) -> None:
        """Run these problems by these algorithms from now on; None: by PyTorch's choice."""
        self.unknown -= algorithms.keys()
        for problem, algorithm in algorithms.items():
            chosen = None if algorithm is None else Product(problem, self.device).prepare(algorithm)
            self._runs[problem] = chosen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        special = [kind for kind in types if kind not in (Tensor, torch.nn.Parameter)]
        if any(hasattr(kind, "__tensor_flatten__") for kind in special):
            return NotImplemented  # a DTensor, or any other wrapper, unpacks its tensors, whose products come here next
        call = None if special else call_of(func, args, kwargs)  # special: fake tensors, which have shapes alone
        run = None if call is None else self._run_of(call)
        return func(*args, **kwargs) if call is None or run is None else run(call.operands())

    def _run_of(self, call: Call) -> Run | None:
        problem = problem_of(call)
        if problem is not None and problem not in self._runs:
            self.unknown.add(problem)
        return None if problem is None else self._runs.get(problem)


def call_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Return the product of two matrices that an operation computes, or None for any other operation."""
    if func is aten.mm.default or func is aten.mm.out:
        a, b = args
        return Call(a, b, kwargs.get("out"), a.dtype)
    if func is aten.addmm.default and not kwargs:  # whose keywords are factors
        bias, a, b = args
        return Call(a, b, None, a.dtype, bias)
    return _call_of_fp8(*args, **kwargs) if func is aten._scaled_mm.default else None


def _call_of_fp8(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None,
    scale_result: Tensor | None = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> Call | None:  # fmt: skip
    scalars = scale_a.numel() == scale_b.numel() == 1
    if not scalars or scale_result is not None or out_dtype is None:
        return None
    return Call(a, b, None, out_dtype, bias, scale_a, scale_b, use_fast_accum)


def problem_of(call: Call) -> Problem | None:
    """Return what a search needs to know of a product, or None where none is made."""
    a, b, out, dtype, bias, scale_a, scale_b, fast = call
    scaled, factors = scale_a is not None, [a, b]
    scales = [tensor for tensor in (scale_a, scale_b) if tensor is not None]
    beside = [tensor for tensor in (out, bias) if tensor is not None]
    of_one_dtype = all(tensor.dtype == dtype for tensor in (beside if scaled else factors + beside))
    if a.device.type not in DEVICES or dtype not in DTYPES or not of_one_dtype:
        return None
    rows, inner, columns = *a.shape, b.shape[1]
    if 2 * rows * inner * columns < FEWEST_FLOPS or _misaligned(*factors, *beside, *scales):
        return None
    if bias is not None and (bias.shape != (columns,) or bias.stride() != (1,)):
        return None
    if out is not None and (out.stride(1) != 1 or out.stride(0) < columns):
        return None
    left, right = Operand.of(a), Operand.of(b)
    if left is None or right is None:
        return None
    stride = columns if out is None else out.stride(0)
    return Problem(left, right, stride, dtype, bias is not None, scaled, fast)


def _misaligned(*tensors: Tensor) -> bool:
    return any(tensor.data_ptr() % ALIGNMENT for tensor in tensors)

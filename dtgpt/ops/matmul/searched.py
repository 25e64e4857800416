"""Matrix products of PyTorch, computed by searched algorithms of cuBLASLt while a context lasts.

The context sees the products that reach the device: those of plain tensors, those that DTensor and `fully_shard` make
of local tensors, and those of backward, whichever module or function asked for them. The other products remain
PyTorch's: those for which no algorithm is known, of few operations, of fp32, of operands with gaps in both directions.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtgpt.ops.matmul.cublaslt import ALIGNMENT, Algorithm, Operand, Problem, Product

aten = torch.ops.aten
DEVICES = ("cuda",)
DTYPES = (torch.bfloat16, torch.float16)
FEWEST_FLOPS = 2e10  # of a product that is worth a search: 25 microseconds on an H200


class Call(NamedTuple):
    """The operands of a product a b + bias."""

    a: Tensor  # [m, k]
    b: Tensor  # [k, n]
    out: Tensor | None  # [m, n]; None: new memory
    bias: Tensor | None  # [n]


class SearchedProducts(TorchDispatchMode):
    """A context that runs products by the algorithms that `use` has named, and records problems that it has not named
    in `unknown`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.unknown: set[Problem] = set()
        self._runs: dict[Problem, Callable[..., Tensor] | None] = {}

    def use(self, algorithms: Mapping[Problem, Algorithm | None]) -> None:
        """Run these problems by these algorithms from now on; None: by PyTorch's choice."""
        self.unknown -= algorithms.keys()
        for problem, algorithm in algorithms.items():
            chosen = None if algorithm is None else Product(problem, self.device).prepare(algorithm)
            self._runs[problem] = chosen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        special = [kind for kind in types if kind not in (Tensor, torch.nn.Parameter)]
        if any(hasattr(kind, "__tensor_flatten__") for kind in special):
            return NotImplemented  # a DTensor, or any other wrapper, unpacks its tensors, whose products come here next
        call = None if special else call_of(func, args, kwargs or {})  # such as fake tensors, which have shapes alone
        run = None if call is None else self._run_of(call)
        if call is None or run is None:
            return func(*args, **(kwargs or {}))
        a, b, out, bias = call
        return run(a, b, a.new_empty(len(a), b.shape[1]) if out is None else out, bias)

    def _run_of(self, call: Call) -> Callable[..., Tensor] | None:
        problem = problem_of(call)
        if problem is not None and problem not in self._runs:
            self.unknown.add(problem)
        return None if problem is None else self._runs.get(problem)


def call_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Return the operands of a product of two matrices, or None for any other operation."""
    if func is aten.mm.default or func is aten.mm.out:
        a, b = args
        return Call(a, b, kwargs.get("out"), None)
    if func is aten.addmm.default and not kwargs:  # whose keywords are factors
        bias, a, b = args
        return Call(a, b, None, bias)
    return None


def problem_of(call: Call) -> Problem | None:
    """Return what a search needs to know of a product, or None where none is made."""
    a, b, out, bias = call
    tensors = [tensor for tensor in call if tensor is not None]
    if a.device.type not in DEVICES or a.dtype not in DTYPES or any(tensor.dtype != a.dtype for tensor in tensors):
        return None
    rows, inner, columns = *a.shape, b.shape[1]
    if 2 * rows * inner * columns < FEWEST_FLOPS or any(tensor.data_ptr() % ALIGNMENT for tensor in tensors):
        return None
    if bias is not None and (bias.shape != (columns,) or bias.stride() != (1,)):
        return None
    left, right = Operand.of(a), Operand.of(b)
    if left is None or right is None or (out is not None and Operand.of(out) is None):
        return None
    if out is not None and out.stride(1) != 1:
        return None
    return Problem(left, right, columns if out is None else out.stride(0), a.dtype, bias is not None)

"""What tests of LayerNorm, GELU and bias gradients do on ranks, in Triton's interpreter and on a GPU."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from dtgpt.ops.norm import layer_norm, residual
from dtgpt.ops.pointwise import bias, gelu
from dtgpt.ops.pointwise.linear import linear_by_column_sum
from dtgpt.ops.random import dropout
from dtgpt.ops.random.dropout import keep_mask
from dtgpt.ops.random.philox import fold, root_key

EPS = 1e-5
# Of bf16 the interpreter cuts bits off where a GPU rounds.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2**-7}

Function = Callable[..., Tensor | tuple[Tensor, ...]]


def keys_of(samples: int, device: torch.device | str = "cpu") -> Tensor:
    """Keys `[B, 2]` as the model has them: a slice of those of many sites."""
    return fold(root_key(5), torch.arange(samples)[:, None], torch.arange(3))[:, 1].to(device)


def draw(shape: Sequence[int], columns: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Tensor]:
    """x, branch, branch_bias, weight, bias: with a mean, and on different scales."""
    activations = [torch.randn(*shape, columns) + 0.5, 2 * torch.randn(*shape, columns)]
    vectors = [0.3 * torch.randn(columns), 1 + 0.3 * torch.randn(columns), torch.randn(columns)]
    return [t.to(dtype).to(device) for t in activations + vectors]


def results(function: Function, inputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, then the gradients of all inputs."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [*(output.detach() for output in outputs), *torch.autograd.grad(outputs, inputs, cotangents)]


@contextmanager
def poisoned():
    """Memory from `torch.empty` is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(fast: Function, oracle: Function, inputs: Sequence[Tensor], outputs: int, tolerance: float = 0.0) -> None:
    """Outputs and gradients of `fast` against those of `oracle` in float64, in norm; `outputs` have the first input's
    shape."""
    inputs = [t.clone().requires_grad_() for t in inputs]
    cotangents = [torch.randn_like(inputs[0]) for _ in range(outputs)]
    with poisoned():
        found = results(fast, inputs, cotangents)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    with mock.patch.object(dropout, "has_triton", lambda x: False):  # whose kernel computes in fp32
        true = results(oracle, wide, [t.double() for t in cotangents])
    for index, (one, other, like) in enumerate(zip(found, true, [inputs[0]] * outputs + inputs, strict=True)):
        assert one.dtype == like.dtype and one.shape == like.shape, index
        error = (one.double() - other).norm() / other.norm()
        assert error <= (tolerance or TOLERANCE[inputs[0].dtype]), (index, error.item())


def check_norms(shape: tuple[int, int], columns: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    """All ways to call the functions of `layer_norm`, on `[*shape, columns]`."""
    x, branch, shift, weight, offset = draw(shape, columns, dtype, device)
    key = keys_of(shape[0], device)

    def norm(function: Function) -> Function:
        return lambda x, weight, offset: function(x, weight, offset, EPS)

    def both(function: Function, key: Tensor | None) -> Function:
        return lambda x, branch, shift, weight, offset: function(
            x, branch, shift, weight, offset, EPS, key, 0.3, (5, 16)
        )

    def without_bias(function: Function, key: Tensor | None) -> Function:
        return lambda x, branch, weight, offset: both(function, key)(x, branch, None, weight, offset)

    def added(function: Function, key: Tensor | None) -> Function:
        return lambda x, branch, shift: function(x, branch, shift, key, 0.3, (5, 16))

    check(norm(layer_norm.layer_norm), norm(layer_norm.layer_norm_reference), [x, weight, offset], 1)
    fast, oracle = layer_norm.residual_norm, layer_norm.residual_norm_reference
    check(without_bias(fast, key), without_bias(oracle, key), [x, branch, weight, offset], 2)
    for k in (key, None):
        check(both(fast, k), both(oracle, k), [x, branch, shift, weight, offset], 2)
        sums = residual.residual, residual.residual_reference
        check(*(added(function, k) for function in sums), [x, branch, shift], 1)


def check_mask(shape: tuple[int, int], columns: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    x, key = torch.zeros(*shape, columns, dtype=dtype, device=device), keys_of(shape[0], device)
    kept = residual.residual(x, x + 1, None, key, 0.3, (3, 8)) != 0
    assert torch.equal(kept, keep_mask(key, [range(3, 3 + shape[1]), range(8, 8 + columns)], 0.3))


def check_gelu(shape: Sequence[int], columns: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    x, _, shift, *_ = draw(shape, columns, dtype, device)
    check(gelu.bias_gelu, gelu.reference, [2 * x, shift], 1)
    total = bias.bias_gradient(x)
    assert total.dtype == dtype
    true = x.double().flatten(0, -2).sum(0)
    assert (total.double() - true).norm() <= TOLERANCE[dtype] * true.norm()


def custom_ops() -> ExitStack:
    """Public functions take their custom ops on a CPU too."""
    stack = ExitStack()
    for module in (layer_norm, residual, gelu):
        stack.enter_context(mock.patch.object(module, "may_fuse", lambda x: True))
    stack.enter_context(mock.patch.object(bias, "has_triton", lambda x: True))
    return stack


def interpret(body: Callable, *cases: tuple) -> None:
    """In a process with TRITON_INTERPRET=1: the kernels on the CPU in place of the ops' references."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_index(tensor, scope):  # numpy 2.4 makes no number of an array of one element, as the interpreter expects
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_index
    ops = [value for module in (layer_norm, residual, gelu, bias) for value in vars(module).values()]
    for op in ops:
        if isinstance(op, torch.library.CustomOpDef) and "cuda" in op._backend_fns:
            op._backend_fns["cpu"] = op._backend_fns["cuda"]
    with custom_ops():
        for case in cases:
            body(*case)


def cut_results(function: Function, inputs: Sequence[Tensor], placements: Sequence[Placement], outputs: int) -> list:
    """`results` of DTensors, gathered, with the placements before that; cotangents are the outputs' index plus x."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(inputs, placements, strict=True)]
    cotangents = [distribute_tensor(inputs[0] + i, mesh, [placements[0]]) for i in range(outputs)]
    with custom_ops():
        made = results(function, cut, cotangents)
    return [(t.placements[0], t.full_tensor()) for t in made]


def cut_linear(x: Tensor, weight: Tensor, shift: Tensor) -> list[list]:
    """(with `linear_by_column_sum`, with `F.linear`), weight and bias cut by columns as in tensor parallelism."""

    def square(function: Function) -> Function:  # outputs of x's shape
        return lambda x, weight, shift: function(x, weight, shift).redistribute(placements=[Replicate()])

    placements = [Replicate(), Shard(0), Shard(0)]
    return [cut_results(square(f), [x, weight, shift], placements, 1) for f in (linear_by_column_sum, F.linear)]

"""What tests of norms, activations and rotary positions do on ranks, in Triton's interpreter and on a GPU."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from dtgpt.ops import activations, more_activations, norms
from dtgpt.ops import rotary_positions as rotary
from dtgpt.ops.kernels import bias, pointwise
from dtgpt.ops.kernels import norm as kernels_of_norm
from dtgpt.ops.kernels import rotary as kernels_of_rotary
from dtgpt.ops.kernels.linear import linear_by_column_sum
from dtgpt.ops.random.dropout import keep_mask
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.ops.rotary_positions import Rotation, angle_table
from tests.support.interpreter import definitions_of, first_kernels_of, run_interpreted

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


def capture(work: Callable[[], list[Tensor]]) -> list[Tensor]:
    """The results of `work`, captured into a CUDA graph after a first run, and replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = work()
    graph.replay()
    return found


def saved_bytes(function: Function, inputs: Sequence[Tensor]) -> int:
    """Bytes that autograd keeps for the backward of `function`."""
    saved = {}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        function(*(t.detach().requires_grad_() for t in inputs))
    return sum(t.nbytes for t in saved.values())


@contextmanager
def poisoned():
    """Memory from `torch.empty` is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(fast: Function, oracle: Function, inputs: Sequence[Tensor], tolerance: float = 0.0) -> None:
    """Outputs and gradients of `fast` against those of `oracle` in float64, in norm; outputs have the first input's
    dtype."""
    inputs = [t.clone().requires_grad_() for t in inputs]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    with definitions_of("dropout"):  # whose kernel computes in fp32
        outputs = oracle(*wide)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        cotangents = [torch.randn_like(t).to(inputs[0].dtype) for t in outputs]
        true = [*outputs, *torch.autograd.grad(outputs, wide, [t.double() for t in cotangents])]
    with poisoned():
        found = results(fast, inputs, cotangents)
    dtypes = [inputs[0].dtype] * len(outputs) + [t.dtype for t in inputs]
    for index, (one, other, dtype) in enumerate(zip(found, true, dtypes, strict=True)):
        assert one.dtype == dtype and one.shape == other.shape, index
        error = (one.double() - other).norm() / other.norm()
        assert error <= (tolerance or TOLERANCE[inputs[0].dtype]), (index, error.item())


def check_norms(
    shape: tuple[int, int], columns: int, dtype: torch.dtype, biased: bool, device: torch.device | str = "cpu"
) -> None:
    """All ways to call the functions of `norm`, on `[*shape, columns]`: LayerNorm if `biased`, else RMSNorm."""
    x, branch, shift, weight, offset = draw(shape, columns, dtype, device)
    vectors, missing = [weight, offset][: 1 + biased], [None] * (not biased)

    def alone(function: Function) -> Function:
        return lambda x, *vectors: function(x, *vectors, *missing, EPS)

    def both(function: Function, key: Tensor | None) -> Function:
        return lambda x, branch, shift, *vectors: function(x, branch, shift, *vectors, *missing, EPS, key, 0.3, (5, 16))

    def without_shift(function: Function, key: Tensor | None) -> Function:
        return lambda x, branch, *vectors: both(function, key)(x, branch, None, *vectors)

    def added(function: Function, key: Tensor | None) -> Function:
        return lambda x, branch, shift: function(x, branch, shift, key, 0.3, (5, 16))

    check(alone(norms.norm), alone(norms.norm_reference), [x, *vectors])
    passed = alone(lambda x, *rest: (x, norms.norm_reference(x, *rest)))
    check(alone(norms.norm_and_pass), passed, [x, *vectors])
    fast, oracle = norms.residual_norm, norms.residual_norm_reference
    for key in (keys_of(shape[0], device), None):
        check(both(fast, key), both(oracle, key), [x, branch, shift, *vectors])
        check(without_shift(fast, key), without_shift(oracle, key), [x, branch, *vectors])
        sums = norms.residual, norms.residual_reference
        if biased:  # once for both norms
            check(*(added(function, key) for function in sums), [x, branch, shift])


def check_mask(shape: tuple[int, int], columns: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    x, key = torch.zeros(*shape, columns, dtype=dtype, device=device), keys_of(shape[0], device)
    kept = norms.residual(x, x + 1, None, key, 0.3, (3, 8)) != 0
    assert torch.equal(kept, keep_mask(key, [range(3, 3 + shape[1]), range(8, 8 + columns)], 0.3))


def check_gelu(shape: Sequence[int], columns: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    x, _, shift, *_ = draw(shape, columns, dtype, device)
    check(activations.bias_gelu, activations.gelu_reference, [2 * x, shift])
    check(more_activations.bias_relu2, more_activations.relu2_reference, [2 * x, shift])
    total = bias.bias_gradient(x)
    assert total.dtype == dtype
    true = x.double().flatten(0, -2).sum(0)
    assert (total.double() - true).norm() <= TOLERANCE[dtype] * true.norm()


def check_same_mask(
    shape: tuple[int, int], columns: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> None:
    """The sum before an RMSNorm is bit for bit that before a LayerNorm, and so is the gradient of what is dropped."""
    x, branch, _, weight, offset = draw(shape, columns, dtype, device)
    leaf, key = branch.requires_grad_(), keys_of(shape[0], device)
    one, other = (norms.residual_norm(x, leaf, None, weight, bias, EPS, key, 0.3, (3, 8))[0] for bias in (None, offset))
    assert torch.equal(one, other)
    gradients = [torch.autograd.grad(total, leaf, torch.ones_like(x))[0] for total in (one, other)]
    assert torch.equal(*gradients)
    kept = keep_mask(key, [range(3, 3 + shape[1]), range(8, 8 + columns)], 0.3)
    assert torch.equal(gradients[0] != 0, kept)


def check_swiglu(shape: Sequence[int], columns: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    x = 2 * torch.randn(*shape, 2 * columns)
    check(activations.swiglu, activations.swiglu_reference, [x.to(dtype).to(device)])


def check_geglu(shape: Sequence[int], columns: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    x = 2 * torch.randn(*shape, 2 * columns)
    check(
        more_activations.GATED["gelu_tanh"],
        lambda x: more_activations.gated_reference(x, "gelu_tanh"),
        [x.to(dtype).to(device)],
    )


ROTATION = Rotation(theta=5e5, factor=8.0, original_length=64)


def check_rotary(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, normed: bool, placed: bool,
    device: torch.device | str = "cpu",
) -> None:  # fmt: skip
    """`rotary_qkv` of qkv of a shape [B, T, G, R + 2, D], with norms of heads (whose weights are fp32 beside bf16) and
    positions of its own or without."""
    batch, length, *_, size = shape
    number = length + 7
    positions = torch.randint(0, number, (batch, length)).to(device) if placed else None
    weights = [1 + 0.3 * torch.randn(size) for _ in range(2 * normed)]
    weights = weights if dtype == torch.bfloat16 else [weight.to(dtype) for weight in weights]
    inputs = [t.to(device) for t in (torch.randn(shape).to(dtype), *weights)]
    table = angle_table(ROTATION, size, number, torch.device(device))

    def fast(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return rotary.rotary_qkv(qkv, positions, ROTATION, number, *weights, eps=EPS)

    def oracle(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return rotary.reference(qkv, positions, table, *weights, eps=EPS)

    sums = normed and dtype == torch.float32  # gradients of a few weights are sums of thousands
    check(fast, oracle, inputs, tolerance=4e-6 if sums else 0.0)


NAMES = (
    "norm_and_pass", "residual_norm", "residual", "bias_gelu", "bias_relu2", "swiglu", "gated", "rotary_qkv",
)  # fmt: skip


def custom_ops() -> ExitStack:
    """Public functions take their custom ops on a CPU too."""
    stack = ExitStack()
    stack.enter_context(first_kernels_of(*NAMES))
    stack.enter_context(mock.patch.object(bias, "has_triton", lambda x: True))
    return stack


def in_interpreter(**bodies: str) -> None:
    """`body(*case)` of this file in a process with Triton's interpreter. bodies: the cases of each, as code."""
    calls = "; ".join(f"b.interpret(b.{body}, {cases})" for body, cases in bodies.items())
    run_interpreted(f"import torch; from tests.support import bodies_norm as b; {calls}")


def interpret(body: Callable, *cases: tuple) -> None:
    """In a process with TRITON_INTERPRET=1: the kernels on the CPU in place of the ops' references."""
    ops = [value for module in (kernels_of_norm, pointwise, bias, kernels_of_rotary) for value in vars(module).values()]
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

    bias.register_rule()
    placements = [Replicate(), Shard(0), Shard(0)]
    return [cut_results(square(f), [x, weight, shift], placements, 1) for f in (linear_by_column_sum, F.linear)]

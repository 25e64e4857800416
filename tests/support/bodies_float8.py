"""What tests of 8-bit floats do in Triton's interpreter and on a GPU."""

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dtgpt.models import layers
from dtgpt.models.binding import bind
from dtgpt.ops.activations import bias_gelu, swiglu
from dtgpt.ops.fp8 import activation, quantize
from dtgpt.ops.fp8.products import Fp8Product
from dtgpt.ops.fp8.sites import Calibration, Site, Sites
from dtgpt.ops.kernels import pointwise
from tests.support.interpreter import run_interpreted

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def interpret(body: str, cases: str) -> None:
    """`body(*case)` of this file in a process of its own, with Triton's interpreter."""
    run_interpreted(f"from tests.support import bodies_float8 as b; [b.{body}(*case) for case in [{cases}]]")


def draw(rows: int, columns: int, device: torch.device | str = "cpu") -> Tensor:
    """bf16 values of many magnitudes, which in part saturate and in part are too small for 8 bits."""
    generator = torch.Generator().manual_seed(rows * columns)
    values = torch.randn(rows, columns, generator=generator) * 2 ** torch.randn(rows, 1, generator=generator).mul(4)
    return values.bfloat16().to(device)


def check_quantize(rows: int, columns: int, device: torch.device | str = "cpu") -> None:
    """The kernels against the reference, bit by bit, with every set of results."""
    x = draw(rows, columns, device)
    if x.is_cuda:
        x[-1, -1] = torch.inf
    else:  # the interpreter does not round to 8 bits as a GPU does, and has no NaN of e4m3fn
        x = (x.to(E5M2).float() * (x.abs() > 2**-10)).bfloat16()
    for dtype, scale in ((E4M3, 16.0), (E5M2, 2.0**12)):
        for wanted in ((True, True, True), (True, True, False), (True, False, False), (False, True, False)):
            factor = torch.tensor(scale, device=device)
            cells = [torch.tensor(0.5, device=device) for _ in range(2)]
            found = quantize.kernels().quantize(x, factor, dtype, cells[0], *wanted)
            true = quantize.reference(x, factor, dtype, cells[1], *wanted)
            for one, other in zip(found[:2], true[:2], strict=True):
                torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(found[2], true[2], equal_nan=True)
            assert torch.equal(*cells)


def check_transpose(rows: int, columns: int, device: torch.device | str = "cpu") -> None:
    """The kernel against the reference, of all values of a byte."""
    q = torch.arange(rows * columns, device=device).remainder(256).to(torch.uint8).view(rows, columns)
    assert torch.equal(quantize.kernels().transpose(q), q.t())


def check_activation(rows: int, columns: int, gated: bool, device: torch.device | str = "cpu") -> None:
    """Activations that quantise their results against the activation's own kernels, quantised by the reference."""
    x, dy = draw(rows, columns * (2 if gated else 1), device), draw(rows, columns, device)
    bias = None if gated else draw(1, columns, device)[0]
    for dtype, scale in ((E4M3, 16.0), (E5M2, 2.0**12)):
        factor = torch.tensor(scale, device=device)
        cells = [torch.tensor(0.5, device=device) for _ in range(4)]
        fast = activation.kernels()
        found = (
            *fast.forward(x, bias, factor, dtype, cells[0], True),
            *fast.backward(dy, x, bias, factor, dtype, cells[1]),
        )
        if gated:
            y, dx = pointwise.swiglu_kernels().swiglu_forward(x), pointwise.swiglu_kernels().swiglu_backward(dy, x)
        else:
            y = pointwise.gelu_kernels().bias_gelu_forward(x, bias)
            dx, d_bias = pointwise.gelu_kernels().bias_gelu_backward(dy, x, bias)
            torch.testing.assert_close(found[4], d_bias, rtol=2**-7, atol=1e-3)
        true = [
            quantize.reference(t, factor, dtype, cell, True, True, False) for t, cell in ((y, cells[2]), (dx, cells[3]))
        ]
        for one, other in zip(found[:4], [*true[0][:2], *true[1][:2]], strict=True):
            differing = (one.float() != other.float()).float().mean().item()
            assert one.shape == other.shape and differing <= (0 if x.is_cuda else 0.3), (dtype, differing)
            if not x.is_cuda:  # the interpreter does not round to 8 bits as a GPU does
                assert (one.float() - other.float()).norm() <= torch.finfo(dtype).eps * other.float().norm(), dtype
        if x.is_cuda:
            assert torch.equal(cells[0], cells[2]) and torch.equal(cells[1], cells[3])


def make_sites(device: torch.device | str, keeps_weights: bool, more: int = 0) -> Sites:
    """Sites of known scales, without amaxes. more: by which powers of two these are larger."""
    scales = [torch.tensor(2.0 ** (power + more), device=device) for power in (4, 6, 12)]
    cells = [Site(scale, 1 / scale, torch.zeros((), device=device)) for scale in scales]
    return Sites(*cells, Calibration(known=True, keeps_weights=keeps_weights))


def assert_fused_mlp(rows: int, width: int, inner: int, gated: bool, device: torch.device | str = "cpu") -> None:
    """Outputs, gradients and amaxes of `layers.mlp` in fp8 with whole matrices against those of its modules."""
    torch.manual_seed(0)
    first = layers.DeferredBiasLinear(width, inner * (2 if gated else 1), bias=not gated)
    second = layers.DeferredBiasLinear(inner, width)
    for module in (first, second):
        module.to(device, torch.bfloat16)
    x, dy = (torch.randn(2, rows // 2, width).bfloat16().to(device) for _ in range(2))
    activation_of = swiglu if gated else bias_gelu

    def run(function, keeps_weights: bool) -> list[Tensor]:
        made = make_sites(device, keeps_weights), make_sites(device, keeps_weights, more=2)  # not each other's
        bind(first, quantised=Fp8Product(made[0]))
        bind(second, quantised=Fp8Product(made[1]))
        inputs = [x.clone().requires_grad_(), first.weight, second.weight, *([] if gated else [first.bias])]
        kept: list[int] = []
        with saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
            y = function(inputs[0])
        assert all((weight.data_ptr() in kept) != keeps_weights for weight in inputs[1:3])
        gradients = torch.autograd.grad(y, inputs, dy)
        return [y, *gradients, *(s.amax for sites in made for s in (sites.input, sites.weight, sites.gradient))]

    def apart(x: Tensor) -> Tensor:
        return second(activation_of(first(x), *([] if gated else [first.bias])))

    parts = run(apart, keeps_weights=False)
    for keeps_weights in (False, True):
        fused = run(lambda x: layers.mlp(x, first, second, activation_of), keeps_weights)
        for index, (one, other) in enumerate(zip(fused, parts, strict=True)):
            tolerance = 2**-7 if index == 4 and not gated else 0  # the bias's gradient is summed in another order
            assert one.dtype == other.dtype and one.abs().max() > 0, index
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)

"""Quantisation to 8-bit floats and their products."""

from dataclasses import replace

import pytest
import torch
from torch.library import opcheck

from dtgpt.inference.kernels.weights import decode_weights
from dtgpt.models import layers
from dtgpt.models.binding import bind
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.ops.activations import swiglu
from dtgpt.ops.fp8 import quantize as module
from dtgpt.ops.fp8.mlp import fp8_mlp
from dtgpt.ops.fp8.product import product
from dtgpt.ops.fp8.products import Fp8Product
from dtgpt.ops.fp8.quantize import quantize, quantize_and_sum, transposed
from dtgpt.ops.kernels.decode.blocks import product as decode_product
from tests.support.bodies_float8 import (
    E4M3,
    E5M2,
    assert_fused_mlp,
    check_activation,
    check_quantize,
    check_transpose,
    draw,
    interpret,
    make_sites,
)
from tests.support.interpreter import needs_triton

CUDA = torch.device("cuda")
ONE = torch.tensor(1.0)


@pytest.mark.parametrize("dtype, scale", [(E4M3, 16.0), (E5M2, 2.0**20)], ids=str)
def test_quantised_values_are_the_nearest_of_their_format(dtype, scale):
    x = draw(40, 24)
    q, q_t = quantize(x, torch.tensor(scale), dtype, None, True, True)
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    every = every[every.isfinite()]
    limit = torch.finfo(dtype).max
    wanted = (x.double() * scale).clamp(-limit, limit)
    nearest = (wanted[..., None] - every).abs().amin(-1)
    assert torch.equal((q.double() - wanted).abs(), nearest)
    assert torch.equal(q_t.view(torch.uint8), q.view(torch.uint8).t())


def test_what_is_not_wanted_is_not_made():
    x, amax = draw(6, 8), torch.zeros(())
    assert quantize(x, ONE, E4M3, None, False, True)[0].numel() == 0
    assert quantize(x, ONE, E4M3, None, True, False)[1].numel() == 0
    q, q_t, total = quantize_and_sum(x.view(2, 3, 8), ONE, E4M3, amax, True, True)
    assert (q.shape, q_t.shape, total.shape) == ((6, 8), (8, 6), (8,))
    assert amax == x.abs().max()
    torch.testing.assert_close(total, x.float().sum(0).bfloat16())


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_large_values_saturate_and_others_than_finite_ones_become_nan(dtype):
    x = torch.tensor([[3e38, -3e38, torch.inf, -torch.inf, torch.nan, 0.0]]).bfloat16()
    amax, limit = torch.tensor(2.0), torch.finfo(dtype).max
    q, _ = quantize(x[:, :2], torch.tensor(2.0**30), dtype, amax, True, False)
    assert q.float().tolist() == [[limit, -limit]] and amax == x[0, 0]
    q, _ = quantize(x, ONE, dtype, amax, True, False)
    assert q.float().isnan().tolist() == [[False, False, True, True, True, False]] and amax.isnan()


def test_an_amax_is_raised_and_never_lowered():
    amax = torch.tensor(3.0)
    quantize(torch.full((2, 2), -1.0).bfloat16(), ONE, E4M3, amax, True, False)
    assert amax == 3
    quantize(torch.full((2, 2), -5.0).bfloat16(), ONE, E4M3, amax, True, False)
    assert amax == 5
    quantize(torch.empty(0, 2).bfloat16(), ONE, E4M3, amax, True, True)
    assert amax == 5


def test_the_op_keeps_the_contract_of_custom_ops():
    for amax, *wanted in [(torch.zeros(()), True, True, True), (None, False, True, False), (None, True, False, False)]:
        opcheck(module._quantize, (draw(5, 1), ONE, E4M3, amax, *wanted))
    opcheck(module._transposed, (draw(5, 3).view(torch.uint8),))


def test_bytes_are_transposed():
    q = torch.arange(6, dtype=torch.uint8).view(2, 3).view(E4M3)
    q_t = transposed(q)
    assert q_t.dtype == E4M3 and q_t.is_contiguous() and q_t.view(torch.uint8).tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E5M2)], ids=str)
def test_a_product_is_that_of_the_values(formats):
    a, b = draw(17, 24), draw(9, 24)
    scales = torch.tensor(8.0), torch.tensor(0.5)
    parts = [quantize(x, s, dtype, None, True, False)[0] for x, s, dtype in zip((a, b), scales, formats, strict=True)]
    found = product(*parts, 1 / scales[0], 1 / scales[1], fast=False, dtype=torch.float32)
    true = (parts[0].double() / 8) @ (parts[1].double() / 0.5).t()
    torch.testing.assert_close(found.double(), true, rtol=1e-6, atol=1e-5)
    bias = draw(1, 9)[0]
    found = product(*parts, 1 / scales[0], 1 / scales[1], fast=True, bias=bias)
    torch.testing.assert_close(found, (true + bias).bfloat16())


@pytest.mark.parametrize("gated", [False, True], ids=["gelu", "swiglu"])
def test_a_fused_mlp_is_that_of_its_parts(gated):
    assert_fused_mlp(60, 16, 24, gated)


def geglu(u: torch.Tensor) -> torch.Tensor:
    gate, up = u.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def gelu_without_bias(u: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(u, approximate="tanh")


def shifted_swiglu(u: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return swiglu(u + bias.to(u.dtype))


@pytest.mark.parametrize("function, width, bias", [
    (geglu, 2, False), (gelu_without_bias, 1, False), (shifted_swiglu, 2, True)
])  # fmt: skip
def test_an_activation_that_no_kernel_knows_is_that_of_the_model(function, width, bias):
    """Between two products in fp8, as of a plan that cuts the matrices."""
    torch.manual_seed(0)
    first, second = layers.DeferredBiasLinear(16, 24 * width, bias=bias), layers.DeferredBiasLinear(24, 16)
    for part in (first, second):
        part.to(torch.bfloat16)
    x, dy = torch.randn(2, 5, 16).bfloat16(), torch.randn(2, 5, 16).bfloat16()

    def run(forward) -> list[torch.Tensor]:
        made = make_sites("cpu", False), make_sites("cpu", False)
        bind(first, quantised=Fp8Product(made[0]))
        bind(second, quantised=Fp8Product(made[1]))
        inputs = [x.clone().requires_grad_(), *first.parameters(), second.weight]
        y = forward(inputs[0])
        cells = [site.amax for sites in made for site in (sites.input, sites.weight, sites.gradient)]
        return [y, *torch.autograd.grad(y, inputs, dy), *cells]

    found = run(lambda x: layers.mlp(x, first, second, function))
    parts = run(lambda x: second(function(first(x), *([first.bias] if bias else []))))
    assert all(map(torch.equal, found, parts)) and all(t.abs().max() > 0 for t in found)


@pytest.mark.parametrize("name, bias", [("swiglu", True), ("gelu", False), ("geglu", False)])
def test_an_activation_that_the_fused_mlp_does_not_have_is_refused(name, bias):
    x, weight, sites = torch.zeros(4, 8).bfloat16(), torch.zeros(8, 8).bfloat16(), make_sites("cpu", False)
    with pytest.raises(ValueError, match=f"no fused kernel computes the activation {name} with"):
        fp8_mlp(x, weight, weight[0] if bias else None, weight, sites, sites, name)
    with pytest.raises(ValueError, match="decode kernels do not know geglu; they have groups, "):
        decode_product(x, weight, None, "geglu")


def test_blocks_say_to_decode_kernels_which_activation_they_have():
    models = {
        "gelu": GPT2Config(num_layers=1, hidden_size=16, num_heads=2, seq_length=8, vocab_size=32),
        "swiglu": LlamaConfig(
            num_layers=1, hidden_size=16, num_heads=2, seq_length=8, vocab_size=32, num_kv_heads=1, ffn_hidden_size=32
        ),
    }
    for name, config in models.items():
        block = config.make_block(0)
        assert decode_weights(block).activation == name
        for other in {"silu", "gelu_tanh", "gelu", "relu2"} - {config.activation}:
            assert decode_weights(replace(config, activation=other).make_block(0)).activation is None


@needs_triton
def test_the_kernels_in_the_interpreter():
    interpret("check_quantize", "(72, 130), (4, 1)")
    interpret("check_transpose", "(72, 130), (4, 1)")
    interpret("check_activation", "(68, 70, False), (36, 40, True)")


SIZES = [(64, 64), (16384, 1024), (1000, 1600), (36, 3072), (4, 8), (76, 1), (4100, 4096)]


@pytest.mark.cuda
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernels_are_bitwise_the_reference(size):
    check_quantize(*size, device=CUDA)
    check_transpose(*size, device=CUDA)


@pytest.mark.cuda
def test_any_number_of_rows_is_quantised_on_a_gpu():
    x, amax = draw(7, 24, CUDA), torch.zeros((), device=CUDA)
    q, q_t = quantize(x, ONE.to(CUDA), E4M3, amax, True, True)
    assert torch.equal(q.view(torch.uint8), q_t.view(torch.uint8).t()) and amax == x.abs().max()


@pytest.mark.cuda
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)], ids=str)
@pytest.mark.parametrize("size", [(256, 128, 512), (16, 16, 16), (100, 30, 70)], ids=str)
def test_products_on_a_gpu(size, formats):
    m, n, k = size
    factors = [draw(rows, k, CUDA).clamp(-448, 448).to(dtype) for rows, dtype in zip((m, n), formats, strict=True)]
    inverse = torch.tensor(0.25, device=CUDA), torch.tensor(2.0, device=CUDA)
    true = factors[0].double() @ factors[1].double().t() / 2
    for fast in (False, True):
        found = product(*factors, *inverse, fast=fast).double()
        assert (found - true).norm() / true.norm() < 2**-8
        bias = draw(1, n + 1, CUDA)[0, 1:]  # its address is no multiple of 16
        found = product(*factors, *inverse, fast=fast, bias=bias).double()
        assert (found - true - bias).norm() / (true + bias).norm() < 2**-8


@pytest.mark.cuda
@pytest.mark.parametrize("gated", [False, True], ids=["gelu", "swiglu"])
@pytest.mark.parametrize("size", [(64, 64), (1000, 1600), (36, 3072), (4, 8)], ids=str)
def test_activations_equal_those_that_are_quantised_afterwards(size, gated):
    check_activation(*size, gated, device=CUDA)


@pytest.mark.cuda
@pytest.mark.parametrize("gated", [False, True], ids=["gelu", "swiglu"])
def test_a_fused_mlp_on_a_gpu(gated):
    assert_fused_mlp(1024, 128, 512, gated, device=CUDA)

"""LayerNorm and RMSNorm, with and without the residual addition before them, against float64."""

import pytest
import torch
from torch.library import opcheck

from dtgpt.ops.kernels import norm as ops
from dtgpt.ops.norms import (
    norm,
    norm_and_pass,
    norm_reference,
    residual,
    residual_norm,
    residual_norm_reference,
    residual_reference,
)
from dtgpt.ops.operation import split_backward
from tests.support.bodies_norm import (
    EPS,
    capture,
    check_mask,
    check_norms,
    check_same_mask,
    custom_ops,
    draw,
    in_interpreter,
    keys_of,
    results,
    saved_bytes,
)
from tests.support.interpreter import needs_triton
from tests.support.pairwise import each_pair

CUDA = torch.device("cuda")
each_norm = pytest.mark.parametrize("biased", [True, False], ids=["layer_norm", "rms_norm"])


@each_norm
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_ops_on_a_cpu_have_the_values_and_gradients_of_float64(dtype, biased):
    with custom_ops():
        check_norms((2, 7), 40, dtype, biased)


def test_plain_torch_on_a_cpu_has_the_values_and_gradients_of_float64():
    check_norms((2, 7), 40, torch.float32, biased=False)


def test_the_references_are_what_they_say():
    x, branch, shift, weight, offset = draw((2, 3), 10, torch.float64)
    total = residual_reference(x, branch, shift, None, 0.0, (0, 0))
    assert torch.equal(total, x + branch + shift)
    centred = total - total.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + offset
    torch.testing.assert_close(norm_reference(total, weight, offset, EPS), normed)
    normed = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    torch.testing.assert_close(norm_reference(x, weight, None, EPS), normed)
    torch.testing.assert_close(torch.nn.functional.rms_norm(x, (10,), weight, EPS), normed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_cpu_sums_gradients_of_16_bits_in_fp32(dtype):
    """Of 900 rows whose sum nearly cancels, a sum in 16 bits would lose two digits."""
    x, gradient = torch.randn(900, 18).to(dtype), (0.1 * torch.randn(900, 18) + 0.003).to(dtype)
    weight, bias = (torch.ones(18, dtype=dtype, requires_grad=True) for _ in range(2))
    exact = gradient.double().sum(0)
    for function in (norm_reference, norm):
        bias.grad = None
        function(x, weight, bias, EPS).backward(gradient)
        assert (bias.grad - exact).norm() < torch.finfo(dtype).eps * exact.norm()


@pytest.mark.slow(3)
@each_pair(biased=[True, False], dropped=[True, False], shifted=[True, False])
def test_the_ops_keep_the_contract_of_custom_ops(dropped, shifted, biased):
    x, branch, shift, weight, offset = (t.requires_grad_() for t in draw((2, 3), 24, torch.float32))
    key, shift, offset = keys_of(2) if dropped else None, shift if shifted else None, offset if biased else None
    opcheck(ops._residual_norm, (x, branch, shift, weight, offset, EPS, key, 0.3, [3, 0]))
    if dropped and shifted:
        opcheck(ops._norm, (x.detach(), weight.detach(), None if offset is None else offset.detach(), EPS))
        opcheck(torch.ops.dtgpt.residual, (x, branch, shift, key, 0.3, [3, 0]))


@each_norm
@pytest.mark.parametrize("index", [0, 1])
def test_an_unused_output_has_no_gradient(index, biased):
    inputs = [t.requires_grad_() for t in draw((2, 3), 24, torch.float64)]
    *given, offset = inputs
    with custom_ops():
        found, true = (
            torch.autograd.grad(
                f(*given, offset if biased else None, EPS, None, 0.0, (0, 0))[index].square().sum(), inputs[:3]
            )
            for f in (residual_norm, residual_norm_reference)
        )
    torch.testing.assert_close(found, true)


@each_norm
@pytest.mark.parametrize("used", ["both", "stream alone", "norm alone"])
def test_a_norm_that_passes_its_input_on_adds_both_gradients(used, biased):
    x, _, _, weight, offset = draw((2, 3), 24, torch.float64)
    found = []
    for function in (norm_and_pass, lambda x, *rest: (x, norm_reference(x, *rest))):
        leaves = [t.clone().requires_grad_() for t in (x, weight, offset)[: 2 + biased]]
        with custom_ops():
            passed, normed = function(*leaves, *[None] * (not biased), EPS)
        loss = passed.square().sum() * (used != "norm alone") + normed.pow(3).sum() * (used != "stream alone")
        loss.backward()
        zero = torch.zeros(())  # of a leaf without a gradient, which may also be one of zeros
        found.append([passed, normed, *(zero if leaf.grad is None else leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.expand_as(theirs), theirs)


@each_norm
def test_fp32_weights_serve_bf16_activations(biased):
    *activations, shift, weight, offset = draw((2, 3), 24, torch.bfloat16)
    vectors = [t.float().requires_grad_() for t in (shift, weight, offset)[: 2 + biased]]
    with custom_ops():
        made = residual_norm(*activations, *vectors, *[None] * (not biased), EPS, keys_of(2), 0.3)
    assert {t.dtype for t in made} == {torch.bfloat16}
    gradients = torch.autograd.grad(made, vectors, made)
    assert {t.dtype for t in gradients} == {torch.float32}


def test_no_probability_means_no_mask():
    x, branch, *_ = draw((2, 3), 24, torch.float32)
    with custom_ops():
        assert torch.equal(residual(x, branch, None, keys_of(2), 0.0), x + branch)


def test_both_norms_draw_the_same_mask():
    with custom_ops():
        check_same_mask((3, 5), 44, torch.float32)


def test_a_shard_that_begins_within_a_block_of_eight_and_a_branch_of_another_shape_are_refused():
    x, branch, _, weight, _ = draw((2, 3), 24, torch.float32)
    with pytest.raises(ValueError, match="multiple of 8"):
        residual(x, branch, None, keys_of(2), 0.3, (0, 4))
    with pytest.raises(ValueError, match="multiple of 8"):
        residual_norm(x, branch, None, weight, None, EPS, keys_of(2), 0.3, (0, 4))
    with pytest.raises(ValueError, match="does not fit"):
        residual_norm(x, branch[:1], None, weight, None, EPS, None, 0.0)


def test_the_meta_device_saves_what_the_op_of_an_rms_norm_saves():
    x, branch, _, weight, _ = draw((2, 3), 24, torch.bfloat16)
    for function, inputs in (
        (lambda x, weight: norm_and_pass(x, weight, None, EPS), [x, weight]),
        (lambda x, branch, weight: residual_norm(x, branch, None, weight, None, EPS, None, 0.0), [x, branch, weight]),
    ):
        on_meta = saved_bytes(function, [t.to("meta") for t in inputs])
        with custom_ops():
            assert on_meta == saved_bytes(function, inputs) == x.nbytes + weight.nbytes + 4 * x[..., 0].numel()


@pytest.mark.slow(2)
@pytest.mark.parametrize("biased, backend", [
    pytest.param(True, "inductor", marks=pytest.mark.compiler), (False, "aot_eager")
], ids=["layer_norm", "rms_norm"])  # fmt: skip
def test_compiled_equals_eager(biased, backend):
    inputs, key = [t.requires_grad_() for t in draw((2, 3), 24, torch.float32)], keys_of(2)

    def layer(x, branch, shift, weight, offset):
        offset = offset if biased else None
        stream, h = norm_and_pass(x, weight, offset, EPS)
        stream, h = residual_norm(stream, h * branch, shift, weight, offset, EPS, key, 0.3, (8, 0))
        return stream, norm(h, weight, offset, EPS)

    inputs = inputs if biased else inputs[:4]
    function = layer if biased else lambda *given: layer(*given, None)
    with custom_ops():
        eager = results(function, inputs, inputs[:2])
        compiled = torch.compile(function, fullgraph=True, dynamic=False, backend=backend)
        for one, other in zip(results(compiled, inputs, inputs[:2]), eager, strict=True):
            torch.testing.assert_close(one, other)


@needs_triton
def test_the_kernels_in_the_interpreter_and_the_documented_mask():
    cases = ["(2, 5), 44, torch.float32", "(1, 1), 8, torch.float32", "(3, 2), 24, torch.float16"]
    cases = ", ".join(f"({case}, {biased})" for case in cases for biased in (True, False))
    in_interpreter(check_norms=cases, check_mask="((3, 5), 44, torch.float32)")


SHAPES = [
    ((3, 33), 1024, torch.bfloat16), ((1, 1), 1024, torch.bfloat16), ((2, 4096), 1024, torch.bfloat16),
    ((2, 77), 768, torch.float16), ((2, 31), 1600, torch.bfloat16), ((3, 50), 100, torch.float32),
    ((2, 9), 12288, torch.bfloat16),  # too wide for registers
]  # fmt: skip
RMS_SHAPES = [
    ((3, 33), 2048, torch.bfloat16), ((2, 2048), 4096, torch.bfloat16), ((2, 9), 8192, torch.bfloat16),
    ((2, 130), 5120, torch.float32),
]  # fmt: skip


@pytest.mark.cuda
@pytest.mark.parametrize(
    "shape, columns, dtype, biased",
    [(*case, True) for case in SHAPES] + [(*case, False) for case in SHAPES + RMS_SHAPES], ids=str,
)  # fmt: skip
def test_the_kernels_have_the_values_and_gradients_of_float64(shape, columns, dtype, biased):
    check_norms(shape, columns, dtype, biased, CUDA)


@pytest.mark.cuda
@pytest.mark.parametrize("check", [check_mask, check_same_mask])
@pytest.mark.parametrize("columns, dtype", [(1024, torch.bfloat16), (100, torch.float32)], ids=str)
def test_the_kernels_on_a_gpu_draw_the_documented_mask(columns, dtype, check):
    check((3, 37), columns, dtype, CUDA)


@pytest.mark.cuda
def test_strided_inputs_and_a_split_backward_on_a_gpu():
    x, branch, _, weight, _ = draw((4, 6), 64, torch.float32, CUDA)
    inputs = [t.transpose(0, 1).requires_grad_() for t in (x, branch)] + [weight.requires_grad_()]
    cotangents = [torch.randn_like(x).transpose(0, 1) for _ in range(2)]

    def layer(x, branch, weight):
        return residual_norm(x, branch, None, weight, None, EPS, None, 0.0)

    fast = results(layer, inputs, cotangents)
    with split_backward():
        plain = results(layer, inputs, cotangents)
    for one, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
def test_rows_do_not_depend_on_their_batch():
    x, branch, _, weight, _ = draw((5, 33), 2048, torch.bfloat16, CUDA)

    def layer(x, branch):
        return residual_norm(x, branch, None, weight, None, EPS, None, 0.0)

    whole = layer(x, branch)
    for sample in range(5):
        part = layer(x[sample : sample + 1, :7], branch[sample : sample + 1, :7])
        assert all(torch.equal(one[sample : sample + 1, :7], other) for one, other in zip(whole, part, strict=True))


@pytest.mark.cuda
def test_gradients_are_the_same_in_every_run_and_in_a_replayed_graph():
    inputs = [t.requires_grad_() for t in draw((4, 1024), 1024, torch.bfloat16, CUDA)]
    cotangents, key = [torch.randn_like(inputs[0]) for _ in range(2)], keys_of(4, CUDA)
    other = keys_of(8, CUDA)[4:]

    def work(key):
        return results(lambda *inputs: residual_norm(*inputs, EPS, key, 0.3), inputs, cotangents)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [work(key), work(other)]
        static = key.clone()
        work(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = work(static)
    for keys, true in zip((key, other, key), (*expected, expected[0]), strict=True):
        static.copy_(keys)
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(found, true, strict=True))


@pytest.mark.cuda
def test_a_compiled_and_a_captured_rms_norm_equal_the_eager_one():
    x, branch, _, weight, _ = draw((4, 1024), 2048, torch.bfloat16, CUDA)
    inputs, key = [t.requires_grad_() for t in (x, branch, weight)], keys_of(4, CUDA)

    def layer(x, branch, weight):
        stream, h = norm_and_pass(x, weight, None, EPS)
        return residual_norm(stream, h + branch, None, weight, None, EPS, key, 0.3, (8, 0))

    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    eager, again, third = (results(f, inputs, inputs[:2]) for f in (layer, layer, compiled))
    replayed = capture(lambda: results(layer, inputs, inputs[:2]))
    for one, other, compiled_one, graph_one in zip(eager, again, third, replayed, strict=True):
        assert torch.equal(one, other) and torch.equal(one, graph_one)
        torch.testing.assert_close(one, compiled_one, rtol=2**-6, atol=2**-5)


@pytest.mark.cuda
def test_a_compiled_layer_norm_equals_the_eager_one_on_a_gpu():
    inputs = [t.requires_grad_() for t in draw((4, 128), 1024, torch.bfloat16, CUDA)]
    key = keys_of(4, CUDA)

    def layer(*inputs):
        return residual_norm(*inputs, EPS, key, 0.3, (8, 0))

    eager = results(layer, inputs, inputs[:2])
    compiled = results(torch.compile(layer, fullgraph=True, dynamic=False), inputs, inputs[:2])
    assert all(torch.equal(one, other) for one, other in zip(compiled, eager, strict=True))

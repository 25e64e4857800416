"""RMSNorm with and without the residual addition before it, against float64 and against LayerNorm's masks."""

import pytest
import torch
from torch.library import opcheck

from dtgpt.ops.fast import split_backward
from dtgpt.ops.norm import rms_norm as ops
from dtgpt.ops.norm.rms_norm import residual_rms_norm, rms_norm, rms_norm_and_pass, rms_norm_reference
from tests.ops.test_layer_norm import interpret, needs_triton
from tests.support.bodies_layer_norm import (
    EPS,
    capture,
    check_rms_mask,
    check_rms_norms,
    custom_ops,
    draw,
    keys_of,
    results,
    saved_bytes,
)

CUDA = torch.device("cuda")


def test_the_reference_is_what_it_says():
    x, _, _, weight, _ = draw((2, 3), 10, torch.float64)
    normed = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    torch.testing.assert_close(rms_norm_reference(x, weight, EPS), normed)
    torch.testing.assert_close(torch.nn.functional.rms_norm(x, (10,), weight, EPS), normed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_ops_on_a_cpu_have_the_values_and_gradients_of_float64(dtype):
    with custom_ops():
        check_rms_norms((2, 7), 40, dtype)


def test_plain_torch_on_a_cpu_has_the_values_and_gradients_of_float64():
    check_rms_norms((2, 7), 40, torch.float32)


@pytest.mark.parametrize("dropped", [True, False])
def test_the_ops_keep_the_contract_of_custom_ops(dropped):
    x, branch, _, weight, _ = (t.requires_grad_() for t in draw((2, 3), 24, torch.float32))
    opcheck(ops._residual_rms_norm, (x, branch, weight, EPS, keys_of(2) if dropped else None, 0.3, [3, 0]))
    if dropped:
        opcheck(ops._rms_norm, (x.detach(), weight.detach(), EPS))


@pytest.mark.parametrize("index", [0, 1])
def test_an_unused_output_has_no_gradient(index):
    x, branch, _, weight, _ = (t.requires_grad_() for t in draw((2, 3), 24, torch.float64))
    with custom_ops():
        found, true = (
            torch.autograd.grad(f(x, branch, weight, EPS, None, 0.0, (0, 0))[index].square().sum(), [x, branch])
            for f in (residual_rms_norm, ops.residual_rms_norm_reference)
        )
    torch.testing.assert_close(found, true)


@pytest.mark.parametrize("used", ["both", "stream alone", "norm alone"])
def test_a_norm_that_passes_its_input_on_adds_both_gradients(used):
    x, _, _, weight, _ = draw((2, 3), 24, torch.float64)
    found = []
    for function in (rms_norm_and_pass, lambda x, *rest: (x, rms_norm_reference(x, *rest))):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        with custom_ops():
            passed, normed = function(*leaves, EPS)
        loss = passed.square().sum() * (used != "norm alone") + normed.pow(3).sum() * (used != "stream alone")
        loss.backward()
        found.append([passed, normed, leaves[0].grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_fp32_weights_serve_bf16_activations():
    x, branch, _, weight, _ = draw((2, 3), 24, torch.bfloat16)
    weight = weight.float().requires_grad_()
    with custom_ops():
        made = residual_rms_norm(x, branch, weight, EPS, keys_of(2), 0.3)
    assert {t.dtype for t in made} == {torch.bfloat16}
    assert torch.autograd.grad(made[1], weight, made[1])[0].dtype == torch.float32


def test_the_mask_is_that_of_layer_norm():
    with custom_ops():
        check_rms_mask((3, 5), 44, torch.float32)


def test_a_shard_that_begins_within_a_block_of_eight_and_a_branch_of_another_shape_are_refused():
    x, branch, _, weight, _ = draw((2, 3), 24, torch.float32)
    with pytest.raises(ValueError, match="multiple of 8"):
        residual_rms_norm(x, branch, weight, EPS, keys_of(2), 0.3, (0, 4))
    with pytest.raises(ValueError, match="does not fit"):
        residual_rms_norm(x, branch[:1], weight, EPS, None, 0.0)


def test_the_meta_device_saves_what_the_op_saves():
    x, branch, _, weight, _ = draw((2, 3), 24, torch.bfloat16)
    for function, inputs in (
        (lambda x, weight: rms_norm_and_pass(x, weight, EPS), [x, weight]),
        (lambda x, branch, weight: residual_rms_norm(x, branch, weight, EPS, None, 0.0), [x, branch, weight]),
    ):
        on_meta = saved_bytes(function, [t.to("meta") for t in inputs])
        with custom_ops():
            assert on_meta == saved_bytes(function, inputs) == x.nbytes + weight.nbytes + 4 * x[..., 0].numel()


def test_compiled_equals_eager():
    x, branch, _, weight, _ = draw((2, 3), 24, torch.float32)
    inputs, key = [t.requires_grad_() for t in (x, branch, weight)], keys_of(2)

    def layer(x, branch, weight):
        stream, h = rms_norm_and_pass(x, weight, EPS)
        stream, h = residual_rms_norm(stream, h * branch, weight, EPS, key, 0.3, (8, 0))
        return stream, rms_norm(h, weight, EPS)

    with custom_ops():
        eager = results(layer, inputs, inputs[:2])
        compiled = results(torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager"), inputs, inputs[:2])
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other)


@needs_triton
def test_the_kernels_in_the_interpreter():
    interpret("check_rms_norms", "((2, 5), 44, torch.float32), ((1, 1), 8, torch.float32), ((3, 2), 24, torch.float16)")


SHAPES = [((3, 33), 2048, torch.bfloat16), ((1, 1), 1024, torch.bfloat16), ((2, 2048), 4096, torch.bfloat16)]
SHAPES += [((2, 77), 768, torch.float16), ((2, 31), 1600, torch.bfloat16), ((3, 50), 100, torch.float32)]
SHAPES += [((2, 9), 8192, torch.bfloat16), ((2, 9), 12288, torch.bfloat16), ((2, 130), 5120, torch.float32)]


@pytest.mark.cuda
@pytest.mark.parametrize("shape, columns, dtype", SHAPES, ids=str)
def test_the_kernels_have_the_values_and_gradients_of_float64(shape, columns, dtype):
    check_rms_norms(shape, columns, dtype, CUDA)


@pytest.mark.cuda
@pytest.mark.parametrize("columns, dtype", [(1024, torch.bfloat16), (100, torch.float32)], ids=str)
def test_the_mask_on_a_gpu_is_that_of_layer_norm(columns, dtype):
    check_rms_mask((3, 37), columns, dtype, CUDA)


@pytest.mark.cuda
def test_strided_inputs_and_a_split_backward_on_a_gpu():
    x, branch, _, weight, _ = draw((4, 6), 64, torch.float32, CUDA)
    inputs = [t.transpose(0, 1).requires_grad_() for t in (x, branch)] + [weight.requires_grad_()]
    cotangents = [torch.randn_like(x).transpose(0, 1) for _ in range(2)]

    def layer(x, branch, weight):
        return residual_rms_norm(x, branch, weight, EPS, None, 0.0)

    fast = results(layer, inputs, cotangents)
    with split_backward():
        plain = results(layer, inputs, cotangents)
    for one, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
def test_rows_do_not_depend_on_their_batch():
    x, branch, _, weight, _ = draw((5, 33), 2048, torch.bfloat16, CUDA)
    whole = residual_rms_norm(x, branch, weight, EPS, None, 0.0)
    for sample in range(5):
        part = residual_rms_norm(x[sample : sample + 1, :7], branch[sample : sample + 1, :7], weight, EPS, None, 0.0)
        assert all(torch.equal(one[sample : sample + 1, :7], other) for one, other in zip(whole, part, strict=True))


@pytest.mark.cuda
def test_gradients_are_the_same_in_every_run_compiled_and_in_a_replayed_graph():
    x, branch, _, weight, _ = draw((4, 1024), 2048, torch.bfloat16, CUDA)
    inputs, key = [t.requires_grad_() for t in (x, branch, weight)], keys_of(4, CUDA)

    def layer(x, branch, weight):
        stream, h = rms_norm_and_pass(x, weight, EPS)
        return residual_rms_norm(stream, h + branch, weight, EPS, key, 0.3, (8, 0))

    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    eager, again, third = (results(f, inputs, inputs[:2]) for f in (layer, layer, compiled))
    replayed = capture(lambda: results(layer, inputs, inputs[:2]))
    for one, other, compiled_one, graph_one in zip(eager, again, third, replayed, strict=True):
        assert torch.equal(one, other) and torch.equal(one, graph_one)
        torch.testing.assert_close(one, compiled_one, rtol=2**-6, atol=2**-5)

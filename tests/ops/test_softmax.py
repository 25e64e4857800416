"""Scaled masked softmax: the reference against PyTorch in fp64, the operation and its kernels against the reference."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from dtgpt.ops.kernels.fused_softmax import softmax_kernels
from dtgpt.ops.kernels.fused_softmax.softmax import cuda_backward, cuda_forward, reference, scaled_masked_softmax
from dtgpt.ops.kernels.fused_softmax.softmax_kernels import SoftmaxLaunch
from dtgpt.ops.random.dropout import attention_dropout
from dtgpt.ops.random.philox import fold, root_key

SCALE, P, START = 0.7, 0.3, (2, 7, 32)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
MASKS = ["none", "causal", "padding", "each query"]


def make_mask(kind: str, shape: tuple[int, ...], device: str = "cpu") -> str | Tensor | None:
    """The first sample, or its first query, may attend to nothing."""
    batch, _, queries, columns = shape
    if kind in ("none", "causal"):
        return None if kind == "none" else kind
    mask = torch.rand(batch, 1, 1 if kind == "padding" else queries, columns, device=device) < 0.4
    mask[0, 0, 0] = True
    return mask


def make_case(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Scores, a gradient and keys."""
    scores, grad = ((3 * torch.randn(shape, device=device)).to(dtype) for _ in range(2))
    return scores, grad, fold(root_key(3), torch.arange(shape[0])).to(device)


def run(function, scores: Tensor, grad: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
    """Probabilities, and the gradient in the scores."""
    scores = scores.detach().requires_grad_()
    result = function(scores, *args, **kwargs)
    return result.detach(), torch.autograd.grad(result, scores, grad.to(result.dtype))[0]


def truth(scores: Tensor, grad: Tensor, mask: str | Tensor | None, key: Tensor | None) -> tuple[Tensor, Tensor]:
    return run(reference, scores.double(), grad, SCALE, mask, key=key, p=P, start=START)


def custom_op(scores, scale, mask, *, key, p, start):
    causal = isinstance(mask, str)
    return torch.ops.dtgpt.softmax_forward(scores, None if causal else mask, key, scale, causal, p, start)[0]


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for out, ref, slack in zip(found, expected, (1, 2), strict=True):
        assert (out.double() - ref).norm() <= slack * TOLERANCE[out.dtype] * ref.norm()
        assert out.isfinite().all()
    nothing = (expected[0] == 0) & (expected[1] == 0)  # hidden, and not only dropped
    assert not found[0][expected[0] == 0].any() and not found[1][nothing].any()


@pytest.mark.parametrize("kind", MASKS)
def test_the_reference_is_pytorchs_softmax(kind):
    scores, grad, key = make_case((2, 3, 5, 11), torch.float64)
    mask = make_mask(kind, scores.shape)
    hidden = torch.ones(5, 11, dtype=torch.bool).triu(7) if kind == "causal" else mask

    def pytorch(x, key=None):  # a row of which all is hidden is nan
        masked = SCALE * x if hidden is None else (SCALE * x).masked_fill(hidden, -math.inf)
        probabilities = masked.softmax(dim=-1).nan_to_num()
        return probabilities if key is None else attention_dropout(probabilities, key, P, START)

    for k in (None, key):
        torch.testing.assert_close(truth(scores, grad, mask, k), run(pytorch, scores, grad, k))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_the_operation_has_the_values_and_gradient_of_the_reference(kind, dtype):
    scores, grad, key = make_case((2, 3, 6, 11), dtype)
    mask = make_mask(kind, scores.shape)
    for k in (None, key):
        expected = truth(scores, grad, mask, k)
        for function in (scaled_masked_softmax, custom_op):
            check(run(function, scores, grad, SCALE, mask, key=k, p=P, start=START), expected)


def test_more_queries_than_columns_leave_the_first_without_any():
    scores, grad, _ = make_case((1, 2, 7, 4), torch.float32)
    result, gradient = run(scaled_masked_softmax, scores, grad, SCALE, "causal")
    assert not result[:, :, :3].any() and not gradient[:, :, :3].any()
    assert (result[:, :, 3:, 0] > 0).all()


@pytest.mark.parametrize("function", [scaled_masked_softmax, custom_op])
def test_a_shard_of_the_heads_drops_what_the_whole_drops(function):
    scores, grad, key = make_case((2, 6, 5, 12), torch.float32)
    whole = run(function, scores, grad, SCALE, "causal", key=key, p=P, start=(0, 0, 0))
    part = run(function, scores[:, 2:4], grad[:, 2:4], SCALE, "causal", key=key, p=P, start=(2, 0, 0))
    for a, b in zip(whole, part, strict=True):
        torch.testing.assert_close(a[:, 2:4], b)


def test_without_a_key_or_probability_nothing_is_dropped():
    scores, _, key = make_case((1, 1, 4, 8), torch.float32)
    expected = scaled_masked_softmax(scores, SCALE)
    assert torch.equal(scaled_masked_softmax(scores, SCALE, p=P), expected)
    assert torch.equal(scaled_masked_softmax(scores, SCALE, key=key), expected)


@pytest.mark.parametrize("with_key", [False, True])
@pytest.mark.parametrize("kind", ["causal", "padding"])
def test_opcheck(kind, with_key):
    scores, grad, key = make_case((2, 2, 3, 5), torch.float32)
    mask, causal = make_mask(kind, scores.shape), kind == "causal"
    settings = (None if causal else mask, key if with_key else None, SCALE, causal, P, list(START))
    torch.library.opcheck(torch.ops.dtgpt.softmax_forward.default, (scores.requires_grad_(), *settings))
    log_sums = torch.ops.dtgpt.softmax_forward(scores, *settings)[1].detach()
    torch.library.opcheck(torch.ops.dtgpt.softmax_backward.default, (grad, scores.detach(), log_sums, *settings))


@pytest.mark.parametrize("function", [scaled_masked_softmax, custom_op])
def test_it_compiles_without_a_break(function):
    scores, grad, key = make_case((2, 2, 6, 9), torch.float32)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)
    args, kwargs = (SCALE, "causal"), {"key": key, "p": P, "start": START}
    found, expected = (run(f, scores, grad, *args, **kwargs) for f in (compiled, function))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("changes, words", [
    ({"scores": torch.zeros(2, 3, 4)}, "four dimensions"), ({"mask": "upper"}, "upper"),
    ({"mask": torch.zeros(2, 3, 4, 5, dtype=torch.bool)}, r"\[2, 1, 1 or 4, 5\]"),
    ({"mask": torch.zeros(2, 1, 4, 5)}, "float32"), ({"key": torch.zeros(3, 2, dtype=torch.int64)}, r"\[2, 2\]"),
    ({"start": (0, 0)}, "head, query, column")
])  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        scaled_masked_softmax(**{"scores": torch.zeros(2, 3, 4, 5), "scale": 1.0, **changes})


# On a GPU.

SHAPES = [
    *[(2, 3, 16, 16), (2, 1, 1, 40), (1, 1, 3, 1), (1, 2, 5, 11), (1, 2, 33, 1023), (1, 2, 64, 1024), (2, 1, 9, 1032)],
    *[(1, 1, 3, 1030), (1, 2, 70, 64), (1, 1, 4, 4096), (1, 1, 2, 16383), (1, 1, 3, 16384)],
]


@pytest.fixture
def kernels():
    if softmax_kernels.built(torch.device("cuda", 0)) is None:
        pytest.skip("the kernels cannot be built here")


def poison_free_memory(like: Tensor) -> None:
    """What the allocator hands out next for such a tensor is full of nan."""
    torch.full_like(like, math.nan)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_kernels_have_the_values_and_gradients_of_the_reference(kernels, dtype):
    for shape, kind, with_key in product(SHAPES, MASKS, (False, True)):
        scores, grad, key = make_case(shape, dtype, "cuda")
        mask, key = make_mask(kind, shape, "cuda"), key if with_key else None
        expected = truth(scores, grad, mask, key)
        poison_free_memory(scores)
        found = run(scaled_masked_softmax, scores, grad, SCALE, mask, key=key, p=P, start=START)
        if shape[-1] == 1:  # the true gradient is 0, what is found is rounding
            found, expected = (found[0],) * 2, (expected[0],) * 2
        check(found, expected)
        if with_key and dtype is torch.float32:  # else a kept probability may round to 0
            assert torch.equal(found[0] != 0, expected[0] != 0)


@pytest.mark.cuda
@pytest.mark.parametrize("how", [SoftmaxLaunch(32, 4), SoftmaxLaunch(256, 2), SoftmaxLaunch(128, 1)], ids=str)
def test_how_rows_are_laid_over_threads_changes_no_value(kernels, how):
    scores, grad, key = make_case((1, 2, 100, 1024), torch.bfloat16, "cuda")
    settings = (None, key, SCALE, True, P, START)
    result, log_sums = cuda_forward(scores, *settings)
    gradient = cuda_backward(grad, scores, log_sums, *settings)
    other, other_sums = cuda_forward(scores, *settings, how=how)
    torch.testing.assert_close(other_sums, log_sums)
    torch.testing.assert_close(other, result, rtol=8e-3, atol=0)
    torch.testing.assert_close(
        cuda_backward(grad, scores, other_sums, *settings, how=how), gradient, rtol=8e-3, atol=1e-6
    )


@pytest.mark.cuda
@pytest.mark.parametrize("with_key", [False, True])
@pytest.mark.parametrize("columns", [1024, 333])
def test_what_causality_hides_is_never_read(kernels, columns, with_key):
    scores, grad, key = make_case((2, 2, 40, columns), torch.bfloat16, "cuda")
    kwargs = {"key": key if with_key else None, "p": P, "start": START}
    expected = run(scaled_masked_softmax, scores, grad, SCALE, "causal", **kwargs)
    hidden = torch.ones(40, columns, dtype=torch.bool, device="cuda").triu(1 + columns - 40)
    poisoned = (x.masked_fill(hidden, math.nan) for x in (scores, grad))
    for a, b in zip(run(scaled_masked_softmax, *poisoned, SCALE, "causal", **kwargs), expected, strict=True):
        assert torch.equal(a, b) and not a.masked_select(hidden).any()


@pytest.mark.cuda
@pytest.mark.parametrize(
    "shape, kind, with_key", [((2, 2, 30, 64), "causal", True), ((1, 1, 2, 16392), "padding", False)]
)
def test_torch_takes_over_where_there_are_no_kernels(shape, kind, with_key, monkeypatch):
    if shape[-1] <= softmax_kernels.LONGEST:
        monkeypatch.setattr(softmax_kernels, "built", lambda device: None)
    scores, grad, key = make_case(shape, torch.bfloat16, "cuda")
    mask, key = make_mask(kind, shape, "cuda"), key if with_key else None
    found = run(scaled_masked_softmax, scores, grad, SCALE, mask, key=key, p=P, start=START)
    check(found, truth(scores, grad, mask, key))


@pytest.mark.cuda
def test_unaligned_and_strided_scores(kernels):
    scores, grad, _ = make_case((2, 2, 16, 64), torch.bfloat16, "cuda")
    shifted = torch.empty(scores.numel() + 1, dtype=scores.dtype, device="cuda")[1:].view_as(scores).copy_(scores)
    strided = scores.transpose(1, 2).contiguous().transpose(1, 2)
    for x in (shifted, strided):
        check(run(scaled_masked_softmax, x, grad, SCALE, "causal"), truth(scores, grad, "causal", None))


@pytest.mark.cuda
def test_a_cuda_graph_replays_with_new_keys(kernels):
    scores, grad, keys = make_case((2, 2, 64, 64), torch.bfloat16, "cuda")
    settings = (SCALE, "causal")
    run(scaled_masked_softmax, scores, grad, *settings, key=keys, p=P)  # builds
    graph, static = torch.cuda.CUDAGraph(), keys.clone()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = run(scaled_masked_softmax, scores, grad, *settings, key=static, p=P)
    for new in (keys, keys + 1):
        static.copy_(new)
        graph.replay()
        for a, b in zip(found, run(scaled_masked_softmax, scores, grad, *settings, key=new, p=P), strict=True):
            assert torch.equal(a, b)


@pytest.mark.cuda
def test_compiled_code_calls_the_kernels(kernels):
    scores, grad, key = make_case((2, 2, 64, 64), torch.bfloat16, "cuda")
    compiled = torch.compile(scaled_masked_softmax, fullgraph=True, dynamic=False)
    args, kwargs = (SCALE, "causal"), {"key": key, "p": P}
    found, expected = (run(f, scores, grad, *args, **kwargs) for f in (compiled, scaled_masked_softmax))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

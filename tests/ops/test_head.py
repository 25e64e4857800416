"""The output projection and its loss in one op, against float64 and PyTorch's own."""

import math

import pytest
import torch

from dtgpt.ops.loss.cross_entropy import row_terms, to_loss_and_gradient_
from dtgpt.ops.loss.head import head_loss, reference
from tests.support.bodies_cross_entropy import (
    HeadCase,
    HeadResult,
    Rows,
    check_kernels,
    head_result,
    head_results,
    refusal_of_other_cuts,
)
from tests.support.interpreter import needs_triton, run_interpreted
from tests.support.ranks import pool

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}  # rounding of logits and of gradients
ALL = 1 << 30  # bytes in which every chunk fits


def make_case(vocab=257, width=384, shape=(3, 7), hidden=48, dtype=torch.float32, device="cpu") -> HeadCase:
    """The padding's logits are the largest of all: they must never count."""
    generator = torch.Generator().manual_seed(vocab + width)
    x = torch.randn(*shape, hidden, generator=generator)
    weight = 2 / math.sqrt(hidden) * torch.randn(width, hidden, generator=generator)
    weight[vocab:] *= 9
    targets = torch.randint(vocab, shape, generator=generator)
    return HeadCase(x.to(device, dtype), weight.to(device, dtype), targets.to(device), vocab)


def truth(case: HeadCase) -> HeadResult:
    """In float64; the gradients are those of 3 x loss, times the case's scale."""
    x, w = case.x.double().requires_grad_(), case.weight.double().requires_grad_()
    logits = torch.nn.functional.linear(x, w)[..., : case.vocab_size]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), case.targets.flatten())
    (3 * case.scale * loss).backward()
    return HeadResult(loss.detach(), loss.detach(), x.grad, w.grad)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def check(case: HeadCase, results: list[HeadResult]) -> None:
    exact, dtype = truth(case), case.x.dtype
    for result in results:
        assert result.loss == results[0].loss and result.loss.dtype == torch.float32
        assert result.dx.dtype == result.dw.dtype == dtype
        assert result.alone.item() == pytest.approx(result.loss.item(), rel=1e-6)
    dw = torch.cat([result.dw for result in results])
    assert error(results[0].loss, exact.loss) < (1e-6 if dtype == torch.float32 else TOLERANCE[dtype])
    assert error(sum(result.dx for result in results), exact.dx) < TOLERANCE[dtype]
    assert error(dw, exact.dw) < TOLERANCE[dtype]
    assert not dw[case.vocab_size :].any()


def test_the_reference_is_true():
    case, exact = make_case(), truth(make_case())
    x, w = case.x.clone().requires_grad_(), case.weight.clone().requires_grad_()
    loss = reference(x, w, case.targets, case.vocab_size)
    (3 * loss).backward()
    assert error(loss.detach(), exact.loss) < 1e-6 and error(x.grad, exact.dx) < 3e-6 and error(w.grad, exact.dw) < 3e-6


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "vocab, width, shape", [(257, 384, (3, 7)), (256, 256, (1, 1)), (3, 128, (1, 5)), (101, 101, (2, 9))]
)
def test_loss_and_gradients_are_those_of_float64(vocab, width, shape, dtype):
    case = make_case(vocab, width, shape, dtype=dtype)
    check(case, [head_result(case)])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 20, 21])
def test_a_bound_on_memory_cuts_the_rows_and_changes_nothing(rows, dtype):
    case = make_case(dtype=dtype)
    check(case, head_results([case], rows * 384 * dtype.itemsize))
    check(case, head_results([case], 1))


@pytest.mark.parametrize("rows", [4, 21])
@pytest.mark.parametrize("world", [2, 3])
def test_a_cut_vocabulary_has_the_loss_and_gradients_of_the_whole(world, rows):
    """In the last case the last rank has padding alone."""
    cases = [make_case(*widths) for widths in [(257, 384), (390, 390), (100, 384)]]
    cases.append(make_case(dtype=torch.bfloat16))
    bound = rows * 384 * 4 // world
    for case, results in zip(cases, zip(*pool().run(world, head_results, cases, bound), strict=True), strict=True):
        check(case, list(results))


def test_ranks_with_unequal_columns_take_the_same_rows_at_a_time():
    """The bound is four rows of the second rank, which has 195 columns, and less than four of the first."""
    case = make_case(391, 391)
    check(case, [answer[0] for answer in pool().run(2, head_results, [case], 4 * 195 * 4, timeout=120)])


def test_a_dtensor_says_itself_how_it_is_cut():
    """391 rows: the second rank has one less."""
    cases = [make_case(), make_case(391, 391)]
    for case, results in zip(cases, zip(*pool().run(2, head_results, cases, ALL, True), strict=True), strict=True):
        check(case, list(results))


def test_a_weight_cut_in_another_way_is_refused():
    assert all("sharded by rows" in answer for answer in pool().run(2, refusal_of_other_cuts))


def test_a_scale_multiplies_the_gradients_and_not_the_loss():
    case = make_case()
    x, w = case.x.clone().requires_grad_(), case.weight.clone().requires_grad_()
    loss = head_loss(x, w, case.targets, 257, scale=torch.tensor(3.0))
    loss.backward()
    check(case, [HeadResult(loss.detach(), loss.detach(), x.grad, w.grad)])
    for scale in (0.25, 1000.0):
        check(case._replace(scale=scale), [head_result(case._replace(scale=scale))])


@pytest.mark.slow(3)
def test_under_a_scale_fp16_gradients_of_a_large_vocabulary_are_those_of_float64():
    """They are of the size 1 / (300 * 50257), below what fp16 can tell apart."""
    case = make_case(50257, 50304, (1, 300), hidden=16, dtype=torch.float16)
    assert error(head_result(case).dx, truth(case).dx) > 2 * TOLERANCE[torch.float16]
    case = case._replace(scale=1024.0 * 300)
    check(case, head_results([case], 128 * 50304 * 2))


@pytest.mark.slow(2)
def test_a_scale_keeps_fp16_gradients_from_underflow():
    """A row of the weight that is nobody's target learns from shares of 2^-12 / 4096 rows, below all of fp16."""
    case, errors = make_case(4096, 4096, (4, 1024), hidden=8, dtype=torch.float16), []
    case = case._replace(x=case.x.abs(), weight=case.weight / 4, targets=case.targets % 100)
    exact = truth(case).dw[100:] / 3
    for scale in (1.0, 65536.0):
        x, w = case.x.clone().requires_grad_(), case.weight.clone().requires_grad_()
        head_loss(x, w, case.targets, 4096, scale=torch.tensor(scale)).backward()
        errors.append(error(w.grad[100:].double() / scale, exact))
    assert errors[1] < TOLERANCE[torch.float16] and errors[0] > 0.05


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_a_large_common_offset_costs_no_accuracy(offset):
    """All logits of a row differ from zero by the offset: the last column of x meets ones."""
    case = make_case()
    x = torch.cat([case.x.mul(64).round().div(64), torch.full((3, 7, 1), offset)], dim=-1)
    weight = torch.cat([case.weight.mul(64).round().div(64), torch.ones(384, 1)], dim=-1)
    moved = case._replace(x=x, weight=weight)
    found, exact = head_result(moved), truth(moved)
    assert error(found.loss, exact.loss) < 1e-3 and error(found.dx[..., :-1], exact.dx[..., :-1]) < 1e-2


def test_backward_may_run_twice():
    case = make_case()
    x, w = case.x.clone().requires_grad_(), case.weight.clone().requires_grad_()
    loss = head_loss(x, w, case.targets, 257)
    first = torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(3 * loss, (x, w))[0])


def test_without_gradients_nothing_is_kept_or_made():
    case = make_case()
    loss = head_loss(case.x, case.weight, case.targets, 257)
    with torch.no_grad():
        assert head_loss(case.x.clone().requires_grad_(), case.weight, case.targets, 257) == loss
    assert loss.grad_fn is None
    assert error(loss, truth(case).loss) < 1e-6


def test_gradients_are_all_that_is_saved_for_backward():
    case, sizes = make_case(dtype=torch.bfloat16), []
    x, w = case.x.clone().requires_grad_(), case.weight.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.shape) or t, lambda t: t):
        head_loss(x, w, case.targets, 257)
    assert sizes == [x.flatten(0, 1).shape, w.shape]


@needs_triton
def test_the_kernels_interpreted_are_the_plain_passes():
    run_interpreted("from tests.support.bodies_cross_entropy import interpret_kernels; interpret_kernels()")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_kernels_are_the_plain_passes(dtype):
    """Rows of several blocks with a tail, and of one."""
    rows = [Rows(300, 50304, 0, 50257), Rows(7, 25152, 25152, 25105), Rows(3, 390, 0, 257), Rows(3, 390, 512, 0)]
    check_kernels("cuda", dtype, rows)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 333), (2, 1024)])
def test_on_a_gpu_loss_and_gradients_are_those_of_float64(dtype, shape):
    """In fp16 under a loss scale: gradients are of the size 1 / (rows * 50257), below all that it can tell apart."""
    case = make_case(50257, 50304, shape, hidden=128, dtype=dtype, device="cuda")
    if dtype == torch.float16:
        case = case._replace(scale=1024.0 * shape[0] * shape[1])
    check(case, [head_result(case)])
    check(case, head_results([case], 300 * 50304 * dtype.itemsize))


@pytest.mark.cuda
def test_offsets_beyond_31_bits():
    """43000 x 50304 logits: those of the last rows lie behind 2^31 elements."""
    logits = torch.randn(50304, device="cuda").bfloat16().expand(43000, -1).contiguous()
    targets = torch.arange(43000, device="cuda")
    terms = row_terms(logits, targets, 0, 50257)
    assert (terms[:2] == terms[:2, :1]).all() and torch.equal(terms[2], logits[0, :43000].float())
    to_loss_and_gradient_(logits, targets, torch.ones((), device="cuda"), 50257)
    assert torch.equal(logits[0, 43000:], logits[-1, 43000:])


@pytest.mark.cuda
def test_a_cuda_graph_replays_with_new_inputs():
    case = make_case(50257, 50304, (2, 128), hidden=128, dtype=torch.bfloat16, device="cuda")
    x, w, scale = case.x.clone().requires_grad_(), case.weight.clone().requires_grad_(), torch.ones((), device="cuda")

    def step():
        loss = head_loss(x, w, case.targets, case.vocab_size, scale=scale)
        return (loss, *torch.autograd.grad(loss, (x, w)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        scale.fill_(8)
        case.targets.add_(1).remainder_(case.vocab_size)
    for out in captured:
        out.detach().fill_(torch.nan)
    graph.replay()
    assert all(error(a, b.double()) < 1e-3 for a, b in zip(captured, step(), strict=True))

"""Operations of mixtures of experts: against float64 by another way, ties, order, starving experts, memory that nobody
wrote, and Triton's interpreter."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dtgpt.ops.activations import swiglu
from dtgpt.ops.experts import routing, rows
from dtgpt.ops.experts.inner import INNER
from dtgpt.ops.experts.products import grouped_linear, grouped_product, grouped_reference, masked_product
from dtgpt.ops.experts.routing import Routing, choose, ranked, router_logits, weigh
from dtgpt.ops.experts.rows import gathered, sorted_rows, summed
from dtgpt.ops.operation import Operation, split_backward
from tests.support.interpreter import needs_triton, run_interpreted

WIDE = torch.float64
TOLERANCE = {WIDE: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
TYPES = list(TOLERANCE)
RULES = {
    "olmoe": Routing(3),
    "qwen3": Routing(3, normalised=True),
    "granite": Routing(3, "softmax_of_chosen"),
    "scaled": Routing(2, "softmax", normalised=True, factor=2.5),
    "glm": Routing(3, "sigmoid", normalised=True, factor=1.5),
    "deepseek": Routing(3, "sigmoid", groups=4, open_groups=2),
}


def numbers(*shape, seed=0, dtype=WIDE) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=WIDE).to(dtype)


@dataclass
class Problem:
    """N tokens, of which each goes through k of E experts."""

    x: Tensor  # [N, H]
    weight: Tensor  # [E, F, H]
    bias: Tensor  # [E, F]
    weights: Tensor  # [N, k]
    experts: Tensor  # [N, k]

    def leaves(self) -> list[Tensor]:
        return [self.x, self.weight, self.bias, self.weights]


def problem(dtype=WIDE, experts: Tensor | None = None, tokens=37, seed=0) -> Problem:
    width, size, count, chosen = 16, 24, 6, 3
    if experts is None:
        experts = ranked(numbers(tokens, count, seed=9), chosen)
    wide = torch.promote_types(dtype, torch.float32)
    made = Problem(
        numbers(tokens, width, seed=seed, dtype=dtype),
        numbers(count, size, width, seed=1, dtype=dtype),
        numbers(count, size, seed=2, dtype=dtype),
        numbers(tokens, chosen, seed=3, dtype=wide),
        experts,
    )
    for leaf in made.leaves():
        leaf.requires_grad_()
    return made


def through(given: Problem) -> Tensor:
    order = sorted_rows(given.experts, len(given.weight))
    made = grouped_linear(gathered(given.x, order), given.weight, given.bias, order.ends)
    return summed(made, given.weights, order)


def one_by_one(given: Problem) -> Tensor:
    """The same token by token, in float64, by no function of `dtgpt`."""
    x, weight, bias, weights = (leaf.to(WIDE) for leaf in given.leaves())
    rows = [
        sum(weights[t, j] * (weight[e] @ x[t] + bias[e]) for j, e in enumerate(chosen))
        for t, chosen in enumerate(given.experts.tolist())
    ]
    return torch.stack(rows)


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.to(WIDE) - expected).norm() / expected.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_experts_and_their_gradients_are_those_of_each_token_alone(dtype):
    given, other = problem(dtype), problem(WIDE)
    for leaf, its in zip(given.leaves(), other.leaves(), strict=True):
        its.data = leaf.detach().to(WIDE)
    found, expected = through(given), one_by_one(other)
    towards = numbers(*found.shape, seed=5)
    (found.to(WIDE) * towards).sum().backward()
    (expected * towards).sum().backward()
    assert found.dtype == dtype and relative(found, expected) < TOLERANCE[dtype]
    for leaf, its in zip(given.leaves(), other.leaves(), strict=True):
        assert relative(leaf.grad, its.grad) < TOLERANCE[dtype]


def test_gradients_that_are_computed_apart_are_the_same():
    given, other = problem(torch.float32), problem(torch.float32)
    through(given).square().sum().backward()
    with split_backward():
        through(other).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(given.leaves(), other.leaves(), strict=True))


def test_rows_are_sorted_by_expert_and_then_by_token():
    experts = problem().experts
    order = sorted_rows(experts, 6)
    own = experts.flatten()[order.slots]
    pairs = list(zip(own.tolist(), order.tokens.tolist(), strict=True))
    assert pairs == sorted(pairs) and len(set(pairs)) == len(pairs)
    assert order.ends.tolist() == [sum(e <= last for e, _ in pairs) for last in range(6)]
    assert order.ends.dtype == torch.int32 and order.ends[-1] == len(pairs)
    assert torch.equal(order.slots[order.places.flatten()], torch.arange(len(pairs)))


def test_a_token_adds_its_rows_in_the_order_of_its_slots():
    """Large addends that cancel: another order has another result."""
    y = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    experts = torch.tensor([[3, 0, 1, 2]])
    order = sorted_rows(experts, 4)
    rows = torch.empty(4, 1)
    rows[order.places[0]] = y  # slot after slot
    expected = ((torch.tensor(1e8) + 1.0) - 1e8) + 1.0
    assert summed(rows, torch.ones(1, 4), order).item() == expected == 1.0
    other = sorted_rows(experts.flip(1), 4)
    rows[other.places[0]] = torch.tensor([[1e8], [-1e8], [1.0], [1.0]])
    assert summed(rows, torch.ones(1, 4), other).item() == 2.0
    x = torch.ones(1, 1, requires_grad=True)
    towards = torch.empty(4, 1)
    towards[order.places[0]] = y
    gathered(x, order).backward(towards)
    assert x.grad.item() == 1.0


ALL_TO_ONE = torch.tensor([[4, 0, 1]]).expand(37, -1)


@pytest.fixture
def unwritten_memory():
    """What nobody wrote is NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_without_rows_or_with_all_of_them_leave_no_nan(unwritten_memory, dtype):
    given = problem(dtype, ALL_TO_ONE)
    found = through(given)
    found.square().sum().backward()
    for leaf in (found, *(leaf.grad for leaf in given.leaves())):
        assert leaf.isfinite().all()
    starved = [2, 3, 5]
    assert not given.weight.grad[starved].any() and not given.bias.grad[starved].any()
    assert given.weight.grad[4].any()


def test_weights_of_experts_without_rows_are_not_read():
    given = problem(torch.float32, ALL_TO_ONE)
    expected = through(given)
    with torch.no_grad():
        given.weight[[2, 3, 5]] = math.nan
    assert torch.equal(through(given), expected)


def test_products_that_mask_rows_are_the_same():
    """What serves on a GPU where no other kernel does."""
    given = problem()
    order = sorted_rows(given.experts, 6)
    rows = given.x.detach()[order.tokens].requires_grad_()
    found, expected = masked_product(rows, given.weight, order.ends), grouped_product(rows, given.weight, order.ends)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(each.square().sum(), [given.weight, rows]) for each in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_shapes_that_do_not_fit_are_refused():
    given = problem()
    with pytest.raises(ValueError, match="do not fit"):
        grouped_linear(given.x, given.weight, None, torch.zeros(5, dtype=torch.int32))


def chosen_by_hand(logits: list[float], rule: Routing, correction: list[float]) -> list[tuple[int, float]]:
    """Return (expert, weight) of one token by sorting Python's numbers."""
    size = len(logits) // rule.groups
    if rule.score == "sigmoid":
        scores = [1 / (1 + math.exp(-z)) for z in logits]
    else:
        scores = [math.exp(z) / sum(map(math.exp, logits)) for z in logits]
    bent = [s + c for s, c in zip(scores, correction, strict=True)]
    groups = [range(first, first + size) for first in range(0, len(logits), size)]
    opened = sorted(groups, key=lambda g: -sum(sorted(bent[e] for e in g)[-2:]))[: rule.open_groups]
    experts = sorted((e for group in opened for e in group), key=lambda e: (-bent[e], e))[: rule.chosen]
    weights = [math.exp(logits[e]) if rule.score == "softmax_of_chosen" else scores[e] for e in experts]
    if rule.normalised or rule.score == "softmax_of_chosen":
        weights = [w / sum(weights) for w in weights]
    return [(e, w * rule.factor) for e, w in zip(experts, weights, strict=True)]


@pytest.mark.parametrize(("name", "corrected"), list(itertools.product(RULES, [False, True])))
def test_experts_and_weights_are_those_of_the_rule(name, corrected):
    rule, logits = RULES[name], numbers(50, 8)
    correction = 0.3 * numbers(8, seed=4) if corrected else None
    experts = choose(logits, rule, correction)
    weights = weigh(logits, experts, rule)
    bent = [0.0] * 8 if correction is None else correction.tolist()
    for token in range(50):
        expected = chosen_by_hand(logits[token].tolist(), rule, bent)
        assert [e for e, _ in expected] == experts[token].tolist()
        assert weights[token].tolist() == pytest.approx([w for _, w in expected])
    if corrected:
        assert not torch.equal(experts, choose(logits, rule))


@pytest.mark.parametrize("name", RULES)
def test_the_gradient_of_weights_is_that_of_small_differences(name):
    rule, logits = RULES[name], numbers(5, 8).requires_grad_()
    experts = choose(logits, rule)
    assert torch.autograd.gradcheck(lambda z: weigh(z, experts, rule), [logits])


def test_of_equal_scores_the_smaller_index_comes_first():
    scores = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 0.0], [0.0] * 6])
    assert ranked(scores, 4).tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    many = torch.zeros(1000, 128)
    assert (ranked(many, 8) == torch.arange(8)).all()
    assert choose(torch.zeros(3, 8), RULES["deepseek"]).tolist() == [[0, 1, 2]] * 3


def test_logits_are_products_of_fp32_copies():
    """The nearest bf16 numbers of x and weight, and no rounding after them."""
    x, weight = numbers(9, 64, dtype=torch.bfloat16), numbers(8, 64, seed=1, dtype=torch.bfloat16)
    logits = router_logits(x, weight, None)
    assert logits.dtype == torch.float32
    assert relative(logits, x.to(WIDE) @ weight.to(WIDE).t()) < 1e-6
    assert relative(logits.bfloat16(), x.to(WIDE) @ weight.to(WIDE).t()) > 1e-4


@pytest.mark.parametrize("apart", [False, True])
def test_gradients_of_logits_are_exact(apart):
    x, weight, bias = (numbers(*shape, seed=i) for i, shape in enumerate([(2, 3, 5), (4, 5), (4,)]))

    def logits(*given: Tensor) -> Tensor:
        if not apart:
            return router_logits(*given)
        with split_backward():
            return router_logits(*given)

    assert torch.autograd.gradcheck(logits, [each.requires_grad_() for each in (x, weight, bias)])


def test_nan_in_a_token_stays_with_it():
    logits = numbers(4, 8)
    logits[1] = math.nan
    experts = choose(logits, RULES["olmoe"])
    assert all(len(set(row)) == 3 and set(row) <= set(range(8)) for row in experts.tolist())
    assert weigh(logits, experts, RULES["olmoe"]).isfinite().all(-1).tolist() == [True, False, True, True]


INTERPRETED = """
import torch
from dtgpt.ops.experts.products import grouped_reference
from dtgpt.ops.experts.rows import _weighted, _weighted_gradients, sorted_rows
from dtgpt.ops.kernels.expert_kernels import grouped_outer, grouped_product, spread_rows, weighted_rows
from dtgpt.ops.kernels.expert_kernels import weighted_rows_gradients
from dtgpt.ops.kernels.swiglu_kernels import swiglu_backward
from tests.ops.test_experts import ALL_TO_ONE, TOLERANCE, WIDE, numbers, problem, relative

for dtype, experts in ((torch.float32, None), (torch.float16, ALL_TO_ONE), (torch.float32, ALL_TO_ONE)):
    given = problem(dtype, experts, tokens=37)
    order = sorted_rows(given.experts, 6)
    rows = given.x.detach()[order.tokens]
    assert torch.equal(spread_rows(given.x.detach(), order.places, len(rows)), rows)
    weight, weights = given.weight.detach(), given.weights.detach()
    limit = TOLERANCE[dtype]
    y = grouped_product(rows, weight, order.ends)
    assert relative(y, grouped_reference(rows.to(WIDE), weight.to(WIDE), order.ends)) < limit
    dy = numbers(*y.shape, seed=8, dtype=dtype)
    back = grouped_product(dy, weight.mT, order.ends)
    assert relative(back, grouped_reference(dy.to(WIDE), weight.mT.to(WIDE), order.ends)) < limit
    outer, begin = grouped_outer(dy, rows, order.ends), 0
    for own, end in zip(outer, order.ends.tolist()):
        expected = dy[begin:end].to(WIDE).t() @ rows[begin:end].to(WIDE)
        assert not own.any() if begin == end else relative(own, expected) < limit
        begin = end
    found = weighted_rows(y, weights, order.places)
    assert relative(found, _weighted(y.to(WIDE), weights.to(WIDE), order.places)) < limit
    grad = numbers(*found.shape, seed=7, dtype=dtype)
    rest = order.places, order.tokens, order.slots
    for one, other in zip(
        weighted_rows_gradients(grad, y, weights, *rest),
        _weighted_gradients(grad.to(WIDE), y.to(WIDE), weights.to(WIDE), *rest),
    ):
        assert relative(one, other) < limit
    # Of another rank's slots there are no rows, and behind the last row is what was in memory.
    held, rest = order.places.clone(), torch.full((5, 16), torch.nan, dtype=dtype)
    held[::3, 1] = -1
    dy, dweights = weighted_rows_gradients(grad, y, weights, held, order.tokens, order.slots)
    full, others = weighted_rows_gradients(grad, y, weights, order.places, order.tokens, order.slots)
    own = held[held >= 0]
    assert torch.equal(dy[own], full[own]) and torch.equal(dweights, torch.where(held < 0, 0, others))
    behind = torch.cat([y.index_fill(0, order.places[::3, 1], torch.nan), rest.new_full((5, y.shape[1]), torch.nan)])
    for factors in (weights, None):
        wide = weighted_rows(behind, factors, held, torch.float32)
        exact = _weighted(y.to(WIDE), None if factors is None else factors.to(WIDE), held)
        assert wide.dtype == torch.float32 and relative(wide, exact) < limit
        assert torch.equal(wide.to(dtype), weighted_rows(behind, factors, held))
    spread = spread_rows(given.x.detach(), held, len(rows) + 5)
    assert len(spread) == len(rows) + 5 and torch.equal(spread[own], rows[own])
    pairs, towards = (numbers(len(rows), size, seed=9, dtype=dtype) for size in (8, 4))
    pairs[20:] = torch.nan
    part = swiglu_backward(towards, pairs, ends=torch.tensor([3, 20], dtype=torch.int32))
    assert torch.equal(part[:20], swiglu_backward(towards[:20], pairs[:20]))
    more = torch.cat([rows, rest])
    assert torch.equal(grouped_product(more, weight, order.ends)[: len(rows)], y)
    tail = torch.full((5, y.shape[1]), torch.nan, dtype=dtype)
    assert torch.equal(grouped_outer(torch.cat([y, tail]), more, order.ends), grouped_outer(y, rows, order.ends))
"""


def check_orders(device: str = "cpu") -> None:
    """Compare ranks and orders of kernels with those of PyTorch's sorts: ties, infinities, and what is no number."""
    from dtgpt.ops.kernels import sort_kernels as kernels

    for tokens, count, chosen in ((1, 4, 2), (300, 64, 8), (5, 5, 5), (130, 40, 7), (40, 200, 3)):
        scores = (2 * numbers(tokens, count, dtype=torch.float32)).round() / 2
        scores[0, 1], scores[-1, 2], scores[-1, 0] = math.inf, -math.inf, math.nan
        scores[tokens // 2], scores[tokens // 3] = math.nan, -math.inf
        scores = scores.to(device)
        found = kernels.ranked(scores, chosen)
        assert torch.equal(found, routing._ranked(scores, chosen))
        for experts in (found, torch.full_like(found, count - 1)):
            for one, other in zip(kernels.sorted_rows(experts, count), rows._sorted_rows(experts, count), strict=True):
                assert one.dtype == other.dtype and torch.equal(one, other)


@needs_triton
def test_orders_of_kernels_are_those_of_stable_sorts_in_the_interpreter():
    run_interpreted("from tests.ops.test_experts import check_orders; check_orders()")


@pytest.mark.cuda
def test_orders_of_kernels_are_those_of_stable_sorts():
    check_orders("cuda")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_behind_the_last_one_change_nothing(dtype, device):
    given = problem(dtype)
    order = sorted_rows(given.experts, 6)
    x, weight, bias = (each.detach().to(device) for each in (given.x[order.tokens], given.weight, given.bias))
    towards, ends = numbers(len(x), 24, seed=5, dtype=dtype).to(device), order.ends.to(device)
    found = []
    for behind in (0, 16):
        leaves = [torch.cat([x, x.new_full((behind, 16), math.nan)]), weight.clone(), bias.clone()]
        y = grouped_linear(*(leaf.requires_grad_() for leaf in leaves), ends, filled=not behind)
        y.backward(torch.cat([towards, towards.new_full((behind, 24), math.nan)]))
        found.append([y[: len(x)], leaves[0].grad[: len(x)], leaves[1].grad, leaves[2].grad])
    for one, other in zip(*found, strict=True):
        assert other.isfinite().all()
        torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert all(map(torch.equal, found[0][:3], found[1][:3]))


@needs_triton
def test_kernels_in_the_interpreter():
    run_interpreted(INTERPRETED)


def on_gpu(given: Problem) -> Problem:
    return Problem(*(leaf.detach().cuda().requires_grad_(leaf.is_floating_point()) for leaf in vars(given).values()))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("experts", [None, ALL_TO_ONE], ids=["spread", "all to one"])
def test_kernels_on_a_gpu(dtype, experts):
    """Near float64, the same bits twice, and replayed as a graph."""
    given, other = on_gpu(problem(dtype, experts)), problem(WIDE, experts)
    for leaf, its in zip(given.leaves(), other.leaves(), strict=True):
        its.data = leaf.detach().cpu().to(WIDE)
    towards = numbers(37, 24, seed=5)
    (one_by_one(other) * towards).sum().backward()
    there = towards.cuda().to(dtype)

    def step() -> list[Tensor]:
        found = through(given)
        # Detached: a kept graph holds nodes of leaves on the stream of the first step, which a capture cannot use.
        return [found.detach(), *torch.autograd.grad(found, given.leaves(), there)]

    first, second = step(), step()
    assert all(map(torch.equal, first, second))
    for found, its in zip(first[1:], other.leaves(), strict=True):
        assert found.isfinite().all()
        assert relative(found.cpu(), its.grad) < 3 * TOLERANCE[dtype]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        graph.replay()
        assert all(map(torch.equal, first, captured))


@pytest.mark.cuda
def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it():
    """A token that is decoded alone has the bits that it has in a batch."""
    width, size, count = 256, 512, 8
    x = numbers(300, width, dtype=torch.bfloat16).cuda()
    weight = numbers(count, size, width, seed=1, dtype=torch.bfloat16).cuda()
    experts = ranked(numbers(300, count, seed=9), 2).cuda()
    order = sorted_rows(experts, count)
    whole = grouped_product(gathered(x, order), weight, order.ends)[order.places]
    assert isinstance(grouped_product, Operation)
    for token in (0, 17, 299):
        alone = sorted_rows(experts[token : token + 1], count)
        rows = gathered(x[token : token + 1], alone)
        assert torch.equal(grouped_product(rows, weight, alone.ends)[alone.places][0], whole[token])


def check_tiles(device: str, dtype: torch.dtype, kernels, tolerance: float) -> None:
    """Products by rows of a stack and by its columns, in wide tiles and in narrow ones, and SwiGLU of them. What lies
    behind the last row may be anything."""
    ends = torch.tensor([130, 130, 389, 397, 600]).int().to(device)
    for columns, size in ((256, 128), (384, 64)):
        x = numbers(610, size, dtype=dtype).to(device)
        x[600:] = math.nan
        stack = numbers(5, columns, size, dtype=dtype).to(device)
        for weight in (stack, stack.mT.contiguous().mT):
            found, inner = kernels.grouped_product(x, weight, ends, activate=True)
            assert kernels.grouped_product(x, weight, ends)[1] is None
            expected = grouped_reference(x, stack, ends)[:600]
            if device == "cuda":
                expected = torch._grouped_mm(x[:600], stack.mT, offs=ends)
            torch.testing.assert_close(found[:600], expected, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(inner[:600], swiglu(expected), rtol=tolerance, atol=tolerance)


TILES_INTERPRETED = """
import torch
from dtgpt.ops.kernels import grouped_kernels
from tests.ops.test_experts import check_tiles
check_tiles("cpu", torch.float32, grouped_kernels, 1e-4)
"""


@needs_triton
def test_products_by_whole_tiles_are_those_of_each_expert_in_the_interpreter():
    run_interpreted(TILES_INTERPRETED)


@pytest.mark.cuda
def test_products_by_whole_tiles_have_the_bits_of_pytorchs_own():
    from dtgpt.ops.kernels import grouped_kernels

    check_tiles("cuda", torch.bfloat16, grouped_kernels, 0.0)
    order = sorted_rows(ranked(numbers(190, 6).cuda().float(), 3), 6)
    leaves = [numbers(*shape, dtype=torch.bfloat16).cuda().requires_grad_() for shape in ((190, 256), (6, 768, 256))]
    results = []
    for operation in (INNER, INNER.definition):
        made = operation(gathered(leaves[0], order), leaves[1], None, order.ends, "silu")
        results.append([made, *torch.autograd.grad(made, leaves, torch.ones_like(made))])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_logits_of_a_16_bit_router_are_sums_in_fp32_whatever_rows_are_beside(device):
    x, weight = (numbers(rows, 256, seed=rows, dtype=torch.bfloat16).to(device) for rows in (600, 8))
    logits = router_logits(x, weight, None)
    assert logits.dtype == torch.float32 and relative(logits, x.to(WIDE) @ weight.to(WIDE).t()) < 1e-6
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    towards = numbers(600, 8, seed=5, dtype=torch.float32).to(device)
    expected = towards.to(WIDE) @ weight.detach().to(WIDE), towards.to(WIDE).t() @ x.detach().to(WIDE)
    found = torch.autograd.grad(router_logits(*leaves, None), leaves, towards)
    assert [relative(*pair) < 3e-3 for pair in zip(found, expected, strict=True)] == [True] * 2
    for few in (1, 7, 64, 300) if device == "cuda" else ():
        assert torch.equal(router_logits(x[:few], weight, None), logits[:few])

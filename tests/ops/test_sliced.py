import functools
import itertools
import math

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from dtgpt.ops.random.dropout import LEVELS, attention_dropout, attention_mask, keep_mask, keep_words, threshold
from dtgpt.ops.random.philox import bits, fold, root_key

KEYS = fold(root_key(3), "dropout", torch.arange(6))


@functools.cache
def words_of(head, row, group):
    """The words that 64 columns share with other rows, and their own."""
    shared = bits(KEYS[0], (range(head, head + 1), range(2**31 + row % 128, 2**31 + row % 128 + 1), 16 * group + 8))
    own = bits(KEYS[0], (range(head, head + 1), range(row, row + 1), 16 * group + 16))
    return shared[0, 0, -8:].tolist(), own[0, 0, 16 * group :].tolist()


def numbers(head, row, column):
    """The 16 digits of an element, from its definition."""
    group, half, lane = column // 64, column % 64 // 32, column % 32
    bit = lane % 2 * 16 + lane // 8 % 2 * 8 + lane // 16 * 4 + lane % 8 // 2
    shared, own = words_of(head, row, group)
    words = shared + own[8 * half : 8 * half + 8]
    return sum((word >> bit & 1) << digit for digit, word in enumerate(words))


@pytest.mark.parametrize("p", [0.1, 0.3, 0.75])
def test_a_decision_compares_the_documented_digits(p):
    mask = attention_mask(KEYS[0], [range(3, 5), range(120, 140), range(50, 200)], p)
    for head, row, column in itertools.product((3, 4), (120, 127, 128, 139), range(50, 200, 3)):
        kept = numbers(head, row, column) >= threshold(p)
        assert bool(mask[head - 3, row - 120, column - 50]) == kept


def test_words_never_change():
    """A resumed run draws the masks that it would have drawn."""
    words = keep_words(KEYS[1], [range(5, 6), range(1000, 1002), range(64, 192)], 6554)
    assert words.tolist() == [[[-281543696515073, -144115188143013889], [-301758767253422097, -9009406868750849]]]


@pytest.mark.parametrize("p", [0.0, 2**-8, 0.1, 0.5, 0.9, 1.0])
def test_the_kept_share_is_right_in_every_lane_and_every_row(p):
    mask = attention_mask(KEYS, [range(4), range(512), range(256)], p).double()
    rate = 1 - threshold(p) / LEVELS
    deviation = math.sqrt(rate * (1 - rate))
    for over in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3)):  # all, columns, rows
        share = mask.mean(over)
        assert (share - rate).abs().max() <= 5 * deviation * math.sqrt(share.numel() / mask.numel()) + 1e-12


def correlation(a, b, rate):
    return ((a - rate) * (b - rate)).mean() / (rate * (1 - rate))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_elements_are_uncorrelated_also_where_they_share_digits(p):
    mask = attention_mask(KEYS, [range(4), range(512), range(256)], p).double()
    rate = 1 - threshold(p) / LEVELS
    for rows, columns in ((128, 0), (256, 0), (0, 32), (128, 32), (0, 1), (0, 64), (0, 2), (0, 8), (1, 0), (64, 0)):
        one, other = mask[..., rows:, columns:], mask[..., : 512 - rows, : 256 - columns]
        assert abs(correlation(one, other, rate)) < 5 / math.sqrt(one.numel()), (rows, columns)
    for one, other in ((mask[1:], mask[:-1]), (mask[:, 1:], mask[:, :-1])):  # samples, heads
        assert abs(correlation(one, other, rate)) < 5 / math.sqrt(one.numel())


def test_decisions_that_share_digits_depend_on_each_other_by_no_more_than_is_said():
    """Of all 2^24 equally likely digits of two such elements."""
    for drop in (1, 127, 128, 255, 256, 6554, 32768 + 128, 65535):
        low = torch.arange(256)
        dropped = (drop // 256 + (low < drop % 256).long()).double() / 256  # given the low digits
        joint, alone = (dropped**2).mean(), dropped.mean()
        assert alone == drop / LEVELS
        assert 0 <= joint - alone**2 <= 2**-18


@pytest.mark.parametrize(
    "part", [(range(5), range(3, 300), range(9)), (range(2, 4), range(130, 390, 7), range(33, 197))]
)
def test_a_shard_draws_its_part_of_the_mask(part):
    whole = attention_mask(KEYS, [range(5), range(400), range(300)], 0.4)
    heads, rows, columns = (slice(r.start, r.stop, r.step) for r in part)
    assert torch.equal(attention_mask(KEYS, part, 0.4), whole[:, heads, rows, columns])


def test_forward_and_backward_use_the_mask_and_keep_the_mean():
    x = torch.ones(6, 3, 40, 50, requires_grad=True)
    y = attention_dropout(x, KEYS, 0.5, (2, 30, 64))
    y.sum().backward()
    assert torch.equal(y != 0, attention_mask(KEYS, [range(2, 5), range(30, 70), range(64, 114)], 0.5))
    assert torch.equal(y, x.grad) and y.max() == 2


def test_an_empty_shard_is_no_special_case():
    assert attention_dropout(torch.ones(6, 3, 5, 0), KEYS, 0.4).shape == (6, 3, 5, 0)
    assert attention_dropout(torch.ones(6, 3, 0, 5), KEYS, 0.4).shape == (6, 3, 0, 5)


aten = torch.ops.aten
SHAPES = {aten.view, aten.slice, aten.unsqueeze, aten.expand, aten.select}
ARITHMETIC = {aten.add, aten.sub, aten.mul, aten.remainder, aten.floor_divide}


def numbers_beside_positions(graph):
    """The integers that arithmetic of a graph combines with an `arange`, or with what follows from one by arithmetic
    and by changes of shape."""
    positions, numbers = set(), []
    for node in graph.nodes:
        operation = getattr(node.target, "overloadpacket", None)
        of_positions = not positions.isdisjoint(node.all_input_nodes)
        if operation is aten.arange or (of_positions and operation in SHAPES | ARITHMETIC):
            positions.add(node)
        if of_positions and operation in ARITHMETIC:
            numbers += [argument for argument in node.args if isinstance(argument, int)]
    return numbers


@pytest.mark.slow(4)
@pytest.mark.parametrize("mask", [attention_mask, keep_mask])
def test_a_gpu_can_compute_in_32_bits_what_a_compiler_takes_for_positions(mask):
    """Inductor folds such arithmetic into indices, which are int32 on a GPU; bitwise operations keep int64."""
    graphs = []

    def keep(module, _):
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    part = [range(3, 5), range(100, 350), range(50, 200)]
    compiled = torch.compile(mask, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    assert torch.equal(compiled(KEYS, part, 0.1), mask(KEYS, part, 0.1))
    assert any(node.target is aten.bitwise_and.Scalar for node in graphs[0].nodes)
    assert all(abs(number) * 350 < 2**31 for number in numbers_beside_positions(graphs[0]))  # in products too

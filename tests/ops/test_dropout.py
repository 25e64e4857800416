import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from dtgpt.models.binding import bind
from dtgpt.models.layers import Dropout
from dtgpt.ops.random.dropout import LEVELS, attention_dropout, dropout, keep_mask, threshold
from dtgpt.ops.random.philox import bits, fold, root_key

KEYS = fold(root_key(3), "dropout", torch.arange(6))


def test_the_mask_is_the_documented_function_of_the_words():
    """Element d of a row compares half of word (d // 2) % 4 of the evaluation with counter d // 8."""
    key, p = KEYS[0], 0.3
    words = bits(key, (7, 20))  # word w of counter c is element 4 c + w
    mask = keep_mask(key, [range(7), range(40)], p)
    for row, d in itertools.product(range(7), range(40)):
        word = int(words[row, d // 8 * 4 + d % 8 // 2])
        half = word >> 16 if d % 2 else word & 0xFFFF
        assert bool(mask[row, d]) == (half >= threshold(p))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_kept_share_is_right_and_the_mean_is_kept(p):
    y = dropout(torch.ones(6, 300, 400), KEYS, p)
    kept = (y != 0).double().mean()
    assert abs(kept - (1 - threshold(p) / LEVELS)) < 5 * math.sqrt(p * (1 - p) / y.numel())
    assert y.max().item() * (1 - threshold(p) / LEVELS) == pytest.approx(1)


@pytest.mark.parametrize("part", [(range(5), range(3, 9)), (range(2, 4), range(19, 37)), (range(4, 5), range(36, 37))])
def test_a_shard_draws_its_part_of_the_mask(part):
    x = torch.randn(6, 5, 37)
    rows, columns = (slice(r.start, r.stop) for r in part)
    shard = dropout(x[:, rows, columns], KEYS, 0.4, start=[r.start for r in part])
    assert torch.equal(shard, dropout(x, KEYS, 0.4)[:, rows, columns])


def test_a_site_with_a_start_draws_its_part_of_the_mask():
    x, site, whole = torch.randn(6, 4, 8, 8), Dropout(0.2, index=1), Dropout(0.2, index=1)
    keys = torch.stack([KEYS + 1, KEYS], dim=1)  # of two sites
    bind(site, start=(2, 0, 0))  # heads 2 and 3, as under tensor parallelism
    assert torch.equal(site(x[:, 2:], keys), dropout(x, KEYS, 0.2)[:, 2:])
    assert torch.equal(whole(x, keys), dropout(x, KEYS, 0.2))


def test_an_empty_shard_is_no_special_case():
    assert dropout(torch.ones(6, 5, 0), KEYS, 0.4).shape == (6, 5, 0)
    assert dropout(torch.ones(6, 0, 5), KEYS, 0.4).shape == (6, 0, 5)


def test_the_mask_depends_on_the_sample_not_on_its_place_in_the_batch():
    x = torch.randn(6, 9, 16)
    order = torch.tensor([4, 0, 5, 1, 3, 2])
    assert torch.equal(dropout(x[order], KEYS[order], 0.5), dropout(x, KEYS, 0.5)[order])


def test_backward_uses_the_same_mask():
    x = torch.randn(6, 9, 16, requires_grad=True)
    y = dropout(x, KEYS, 0.5)
    y.sum().backward()
    assert torch.equal(x.grad, dropout(torch.ones_like(x), KEYS, 0.5))


@pytest.mark.parametrize("of", [dropout, attention_dropout])
def test_without_the_layers_around_an_operation_it_is_that_operation(of):
    """On a CPU, `dropout` goes past `dtgpt::dropout`, also in the gradient and in that of the gradient."""
    found = []
    for call in (of, lambda *inputs: torch.ops.dtgpt.dropout(*inputs, 0.4, [0, 0], of is attention_dropout)):
        x = torch.arange(6 * 9 * 40.0).reshape(6, 9, 40).requires_grad_()
        y = call(x, KEYS, 0.4) if call is of else call(x, KEYS)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        found.append((y, grad, second))
    assert found[0][0].grad_fn.name() != found[1][0].grad_fn.name()  # two ways indeed
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_no_key_or_no_probability_is_the_identity():
    x = torch.randn(6, 9, 16)
    assert Dropout(0.5)(x, None) is x
    assert dropout(x, KEYS, 0.0) is x


def saved_sizes(function, *inputs):
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        function(*inputs)
    return sizes


def test_dropout_saves_nothing_but_the_keys():
    x = torch.randn(6, 9, 16, requires_grad=True)
    assert saved_sizes(lambda: dropout(x, KEYS, 0.5)) == [KEYS.nbytes]


@pytest.mark.slow(3)
@pytest.mark.compiler
def test_compiled_dropout_equals_eager_and_saves_nothing():
    def layer(x, weight, keys):
        return dropout(F.gelu(x @ weight), keys, 0.25) + x

    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    weight = torch.linspace(-1, 1, 256).cos().reshape(16, 16).requires_grad_()
    results = []
    for function in (layer, compiled):
        x = torch.linspace(-2, 2, 6 * 40 * 16).reshape(6, 40, 16).requires_grad_()
        y = function(x, weight, KEYS)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    for eager, fast in zip(*results, strict=True):
        assert (fast - eager).norm() < 1e-5 * eager.norm()

    x = torch.randn(6, 40, 16, requires_grad=True)
    saved = sum(saved_sizes(compiled, x, weight, KEYS))
    assert saved <= sum(t.nbytes for t in (x, weight, x @ weight, KEYS))

"""Buckets: gradients of all micro-batches and replicas in fp32."""

import itertools

import pytest
import torch
from torch import nn

from dtgpt.parallel.collectives import FlatSum
from dtgpt.parallel.gradients import Bucket, Buckets
from tests.support.bodies_gradients import by_hand, error_of_sum, filled, losses_of, make_model, over_replicas, summed
from tests.support.ranks import pool


def poisoned(buckets: Buckets) -> Buckets:
    """What an earlier step left must not count."""
    for bucket in buckets.all:
        bucket.flat.fill_(torch.nan)
    return buckets


@pytest.mark.slow(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_micro_batches_are_summed_in_fp32_from_the_first_on(dtype, count):
    model = make_model(dtype)
    expected = {p: summed(parts) for p, parts in by_hand(model, count).items()}
    buckets = poisoned(filled(model, None, count))
    for _ in range(2):  # a second step finds the first one's sums
        buckets.begin()
        for loss in losses_of(model, count):
            loss.backward()
            assert all(p.grad is None for p in model.parameters())
        totals = buckets.totals(list(expected))
        assert all(
            t.dtype == torch.float32 and torch.equal(t, expected[p]) for p, t in zip(expected, totals, strict=True)
        )


def test_a_step_may_be_begun_in_pieces():
    """As graphs want it: each piece says itself which micro-batch it is."""
    model = make_model(torch.bfloat16)
    expected = {p: summed(parts) for p, parts in by_hand(model, 3).items()}
    buckets = poisoned(filled(model, None, 3))
    for index, loss in enumerate(losses_of(model, 3)):
        buckets.begin(done=index)
        loss.backward()
    assert all(map(torch.equal, buckets.totals(list(expected)), expected.values()))


def test_there_is_a_bucket_for_each_block_and_one_for_the_ends():
    """The tied table is in it once."""
    model = make_model(torch.float32)
    buckets = filled(model, None, 1)
    names = {p: name for name, p in model.named_parameters()}
    parts = [{names[p] for p in bucket.parameters} for bucket in buckets.all]
    assert all(name.startswith(f"blocks.{i}.") for i in range(2) for name in parts[i])
    assert parts[2] == {"embedding.wte.weight", "embedding.wpe.weight", "head.ln_f.weight", "head.ln_f.bias"}
    assert sum(map(len, parts)) == len(names) and len(buckets.all) == 3
    assert [b.flat.numel() for b in buckets.all] == [sum(p.numel() for p in b.parameters) for b in buckets.all]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_a_bucket_is_taken_when_all_have_arrived_in_whatever_order(order):
    parameters = [nn.Parameter(torch.zeros(n + 1, dtype=torch.bfloat16)) for n in range(3)]
    bucket = Bucket(parameters, FlatSum(torch.zeros(6), None), passes=2, hooks=True)
    bucket.begin()
    for micro_batch in (1, 2):
        for position, index in enumerate(order):
            (parameters[index] * (10 * index + micro_batch)).sum().backward()
            assert bucket.done == micro_batch - (position < 2)
            assert (parameters[index].grad is None) == (position == 2)
    assert [total.tolist() for total in bucket.sums] == [[3.0], [23.0] * 2, [43.0] * 3]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replicas_are_summed_once_and_while_backward_goes_on(dtype, count):
    for same, during, sums in pool().run(2, over_replicas, dtype, count, True):
        assert all(same) and len(same) == 2 * 12 + 4
        assert sums == 3 and len(during) == 3 and during[0] == during[1] != during[2]  # blocks, then the ends


@pytest.mark.parametrize("count", [1, 3])
def test_without_hooks_everything_is_taken_at_the_end(count):
    """A schedule that cuts backward in two calls none."""
    for same, during, sums in pool().run(2, over_replicas, torch.float32, count, False):
        assert all(same) and during == [] and sums == 3


def test_the_error_of_a_narrow_sum_does_not_grow_with_the_replicas():
    """One rounding of the exact sum, where a ring of bf16 additions would make one at each replica."""
    for worst in pool().run(4, error_of_sum):
        assert worst <= 2**-8

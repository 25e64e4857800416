"""The pool of rank processes that the tests of distributed code run on."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankFailed, pool

pytestmark = pytest.mark.slow(4)


def sum_over_ranks(value):
    total = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return total.item()


def environment(*names):
    return [os.environ.get(name) for name in names]


def send_back(value):
    return dist.get_rank(), value


def sum_of_shards(groups):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    for _ in range(groups):
        dist.new_group()
    mesh = init_device_mesh("cpu", (2, 2))
    rows = distribute_tensor(torch.ones(2, 2), mesh, [Replicate(), Shard(0)])
    return (rows @ rows.t()).sum().full_tensor().item()


def raise_on(rank):
    if dist.get_rank() == rank:
        print("a note on stderr", file=sys.stderr)
        raise ValueError("bad number")
    dist.barrier()


def kill_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep_on(rank):
    if dist.get_rank() == rank:
        time.sleep(600)


def test_results_come_back_in_the_order_of_ranks():
    tensor = torch.arange(3.0)
    results = pool().run(2, send_back, tensor)
    assert [rank for rank, _ in results] == [0, 1]
    assert all(torch.equal(value, tensor) for _, value in results)


def test_ranks_talk_to_each_other_in_groups_of_any_size():
    assert pool().run(3, sum_over_ranks, 2) == [12] * 3
    assert pool().run(1, sum_over_ranks, 2) == [2]


def test_ranks_see_their_place_and_the_cache_of_the_parent(monkeypatch):
    monkeypatch.setenv("DTGPT_CACHE", "/some/cache")
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "DTGPT_CACHE"]
    assert pool().run(2, environment, *names) == [[str(rank), "2", str(rank), "2", "/some/cache"] for rank in range(2)]


def test_next_call_reuses_the_processes():
    first = pool().run(2, os.getpid)
    assert pool().run(2, os.getpid) == first
    assert pool().run(1, os.getpid) == first[:1]


def test_next_call_may_make_the_same_mesh_of_other_groups():
    assert [pool().run(4, sum_of_shards, groups) for groups in (2, 0)] == [[8] * 4] * 2


def test_traceback_of_a_failing_rank_arrives_while_the_others_are_blocked():
    pool().run(2, os.getpid)
    start = time.monotonic()
    told = r"ranks \[1\] of 2: ValueError: bad number(?s:.*)a note on stderr(?s:.*)ValueError: bad number"
    with pytest.raises(RankFailed, match=told):
        pool().run(2, raise_on, 1)
    assert time.monotonic() - start < 60  # of a timeout of 120
    assert pool().run(2, sum_over_ranks, 1) == [3, 3]


def test_killed_rank_is_named():
    with pytest.raises(RankFailed, match=r"ranks \[1\] of 2: a process died with exit code -9"):
        pool().run(2, kill_on, 1)
    assert pool().run(2, sum_over_ranks, 1) == [3, 3]


def test_hung_rank_is_named_with_its_stack():
    pool().run(2, os.getpid)
    with pytest.raises(RankFailed, match=r"ranks \[1\] of 2: no answer within 1 s(?s:.*)in sleep_on"):
        pool().run(2, sleep_on, 1, timeout=1)
    assert pool().run(2, sum_over_ranks, 1) == [3, 3]

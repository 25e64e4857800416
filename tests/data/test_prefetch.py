"""Batches made by a thread are those that are made without it."""

import threading

import pytest
import torch

from dtgpt.data.prefetched.prefetcher import Prefetcher
from tests.support.runs import training

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def numbers(step: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(257, (4, 1000), generator=generator), torch.tensor([step])


def broken_at(step: int):
    def make(wanted: int) -> tuple[torch.Tensor, ...]:
        if wanted == step:
            raise OSError(f"no text for step {step}")
        return numbers(wanted)

    return make


@pytest.fixture
def unpinned(monkeypatch):
    """The thread's way without CUDA: pinned memory and the copy are the device's part."""

    def threaded(make) -> Prefetcher:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
            ahead = Prefetcher(make, CUDA)
        ahead.device = CPU
        return ahead

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return threaded


def same(found, expected) -> bool:
    return all(map(torch.equal, found, expected)) and len(found) == len(expected)


def test_without_cuda_the_caller_makes_them():
    made = []
    ahead = Prefetcher(lambda step: (made.append((step, threading.current_thread())), numbers(step))[1], CPU)
    assert all(same(ahead.take(step), numbers(step)) for step in (0, 1, 5, 5))
    assert made == [(step, threading.main_thread()) for step in (0, 1, 5, 5)]


def test_the_thread_makes_the_same_and_the_next_in_advance(unpinned):
    made = []
    ahead = unpinned(lambda step: (made.append((step, threading.current_thread())), numbers(step))[1])
    assert all(same(ahead.take(step), numbers(step)) for step in range(4))
    ahead._next[1].result()
    assert [step for step, _ in made] == [0, 1, 2, 3, 4]
    assert made[0][1] is threading.main_thread() and all(thread is not made[0][1] for _, thread in made[1:])


def test_a_step_out_of_order_is_made_anew(unpinned):
    ahead = unpinned(numbers)
    assert all(same(ahead.take(step), numbers(step)) for step in (3, 4, 7, 7, 0, 1))


@pytest.mark.parametrize("threaded", [False, True])
def test_an_error_in_making_a_batch_reaches_the_caller_when_its_turn_comes(unpinned, threaded):
    ahead = unpinned(broken_at(2)) if threaded else Prefetcher(broken_at(2), CPU)
    assert same(ahead.take(0), numbers(0)) and same(ahead.take(1), numbers(1))
    with pytest.raises(OSError, match="no text for step 2"):
        ahead.take(2)
    assert same(ahead.take(3), numbers(3))


def test_a_batch_beyond_the_last_step_that_cannot_be_made_disturbs_nobody(unpinned):
    ahead = unpinned(broken_at(1))
    assert same(ahead.take(0), numbers(0))
    ahead._next[1].exception()


def test_a_runs_batches_do_not_depend_on_the_thread(recipe, unpinned):
    run = training(recipe)
    ahead = unpinned(run.objective.read)
    for step in range(3):
        windows, ids, key = ahead.take(step)
        assert same((windows, ids, key), run.objective.batches.take(step))
        assert ids.tolist() == list(range(8 * step, 8 * step + 8)) and windows.shape == (8, 17) and key.shape == (2,)


@pytest.mark.cuda
def test_on_a_gpu_batches_come_through_pinned_memory_without_a_wait():
    """More steps than the allocator of pinned memory has blocks in flight, and a device that is busy all the time."""
    ahead, busy = Prefetcher(numbers, CUDA), torch.randn(2048, 2048, device=CUDA)
    ahead.take(0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = []
        for step in range(1, 30):
            busy = busy @ busy
            found.append(ahead.take(step))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(t.is_cuda for batch in found for t in batch)
    assert all(same([t.cpu() for t in batch], numbers(step)) for step, batch in enumerate(found, start=1))
    with pytest.raises(OSError, match="no text"):
        Prefetcher(broken_at(0), CUDA).take(0)

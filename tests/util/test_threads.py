"""Work for threads is done whether the system starts all of them, some or none."""

import threading
import time
from multiprocessing.context import SpawnProcess

import pytest

from dtgpt.data.prepare.pool import ordered_map
from dtgpt.util.machine.threads import Threads
from tests.data.test_prefetch import CUDA, Prefetcher, numbers, same


@pytest.fixture(params=[0, 1, 2, 9])
def allowed(request, monkeypatch):
    start, started = threading.Thread.start, []

    def refuse(thread):
        if len(started) >= request.param:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return request.param


def test_all_work_is_done_once_and_in_order(allowed):
    done = []

    def work(number):
        time.sleep(0.001 * (number % 3))
        done.append((number, threading.current_thread() is threading.main_thread()))
        return -number

    with Threads(4) as pool:
        assert list(pool.map(work, range(30))) == [-n for n in range(30)]
    assert sorted(n for n, _ in done) == list(range(30)) and {main for _, main in done} == {allowed == 0}
    assert not any(thread.name.endswith("(_serve)") for thread in threading.enumerate())


def test_an_error_is_that_of_its_work(allowed):
    with Threads(2) as pool:
        futures = [pool.submit(divmod, 1, n) for n in (1, 0, 2)]
        assert futures[0].result() == (1, 0) and futures[2].result() == (0, 1)
        with pytest.raises(ZeroDivisionError):
            futures[1].result()


def test_work_that_was_cancelled_is_not_done():
    done, go_on = [], threading.Event()
    with Threads(1) as pool:
        pool.submit(go_on.wait)
        assert pool.submit(done.append, 1).cancel()
        go_on.set()
    assert not done


def test_ctrl_c_is_not_kept_for_later(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError()))
    with pytest.raises(KeyboardInterrupt), Threads(2) as pool:
        pool.submit(interrupted)


def test_batches_are_made_without_a_thread(allowed, monkeypatch):
    monkeypatch.setattr("torch.Tensor.pin_memory", lambda tensor: tensor)
    ahead = Prefetcher(numbers, CUDA)
    monkeypatch.setattr("torch.Tensor.to", lambda tensor, *_, **__: tensor)
    assert all(same(ahead.take(step), numbers(step)) for step in (0, 1, 2, 5, 5, 0))
    assert (ahead._thread is None) == (allowed == 0)


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_text_is_encoded_by_as_many_workers_as_can_be_started(allowed, processes, monkeypatch, capsys):
    start, started = SpawnProcess.start, []

    def refuse(process):
        if len(started) >= processes:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(process)
        start(process)

    monkeypatch.setattr(SpawnProcess, "start", refuse)
    with ordered_map(abs, 3) as mapped:
        assert list(mapped(range(-20, 0))) == list(range(20, 0, -1))
    assert len(started) == processes and not any(process.is_alive() for process in started)
    told = f"{processes} of 3 worker processes could be started (Resource temporarily unavailable)"
    assert (told in capsys.readouterr().err) == (processes < 3)

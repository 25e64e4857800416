"""Timers of the parts of a training step.

A GPU works behind the program that queues its work, so a clock of the host would measure the queueing, and to wait for
the device would stop what is measured. With CUDA a timer is a pair of events, which are read when the device has passed
them."""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class Timers:
    """Seconds that parts of steps take, by name, on this rank.

    Nothing waits for the device before `take`. On a CPU, and for work of the host, a part is what the host measures.
    """

    def __init__(self, enabled: bool, device: torch.device):
        self.enabled, self._on_device = enabled, device.type == "cuda"
        self._steps, self._seconds = 0, defaultdict[str, float](float)
        self._open: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()  # which the device may not have met
        self._spare: list[torch.cuda.Event] = []

    def measure(self, name: str, host: bool = False) -> AbstractContextManager[None]:
        """Return a context that adds its time to that of `name`. host: measure the host, not the device's queue."""
        if not self.enabled:
            return nullcontext()
        return self._events(name) if self._on_device and not host else self._clock(name)

    def next_step(self) -> None:
        """Count a step, and take in what the device has done by now."""
        self._steps += 1
        self._read(wait=False)

    def take(self) -> dict[str, float]:
        """Return the mean seconds of each part in a step since the last call, and start over. Waits for the device."""
        self._read(wait=True)
        means = {name: seconds / max(1, self._steps) for name, seconds in self._seconds.items()}
        self._seconds.clear()
        self._steps = 0
        return means

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - begin

    @contextmanager
    def _events(self, name: str) -> Iterator[None]:
        begin, end = self._event(), self._event()
        begin.record()
        yield
        end.record()
        self._open.append((name, begin, end))

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)

    def _read(self, wait: bool) -> None:
        while self._open:
            name, begin, end = self._open[0]
            if wait:
                end.synchronize()
            elif not end.query():
                return
            self._seconds[name] += begin.elapsed_time(end) / 1000
            self._spare += [begin, end]
            self._open.popleft()


NO_TIMERS = Timers(False, torch.device("cpu"))

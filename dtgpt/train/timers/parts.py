"""Timers of the parts of a training step.

A GPU works behind the program that queues its work, so a clock of the host would measure the queueing, and to wait for
the device would stop what is measured. With CUDA a timer is a pair of events, which are read when the device has passed
them."""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.distributed import ReduceOp

from dtgpt.parallel.engine import Timers
from dtgpt.parallel.mesh import Mesh

TIMED = ("forward_backward", "forward", "backward", "optimizer", "data")  # parts of a step that have timers


class PartTimers(Timers):
    """Seconds that parts of steps take, by name, on this rank.

    Nothing waits for the device before `take`. On a CPU, and for work of the host, a part is what the host measures.
    """

    enabled = True

    def __init__(self, device: torch.device):
        self._on_device = device.type == "cuda"
        self._steps, self._seconds = 0, defaultdict[str, float](float)
        self._open: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()  # which the device may not have met
        self._spare: list[torch.cuda.Event] = []

    def measure(self, name: str, host: bool = False) -> AbstractContextManager[None]:
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

    def seconds(self, mesh: Mesh) -> dict[str, float]:
        own = self.take()
        seconds = torch.tensor([own.get(name, -1.0) for name in TIMED], dtype=torch.float64, device=mesh.device)
        slowest = mesh.all_reduce(seconds, ReduceOp.MAX).tolist()
        return {f"{name}_seconds": value for name, value in zip(TIMED, slowest, strict=True) if value >= 0}

    def line(self, record: Mapping[str, float], graphs: bool) -> str:
        return timer_line(record, graphs)

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


def timer_line(record: Mapping[str, float], graphs: bool) -> str:
    """Return `ms/step: forward-backward 36.9 (forward 12.1, backward 24.3), ...` of a record; empty without timers.
    graphs: steps are replayed as CUDA graphs, in which forward and backward are one."""
    known = {name: record[f"{name}_seconds"] * 1000 for name in TIMED if f"{name}_seconds" in record}
    if not known:
        return ""
    parts = [f"{name} {known[name]:.1f}" for name in ("forward", "backward") if name in known]
    inner = ", ".join(parts) or ("replayed as CUDA graphs" if graphs else "")
    shown = {name: f"{name.replace('_', '-')} {value:.1f}" for name, value in known.items()}
    if inner and "forward_backward" in shown:
        shown["forward_backward"] += f" ({inner})"
    return "  ms/step: " + ", ".join(shown[n] for n in ("forward_backward", "optimizer", "data") if n in shown)

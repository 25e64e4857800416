"""Pieces of a training step as CUDA graphs: captured once, then replayed without the host's help.

Without a graph every parallel step waits for the host, which launches kernels one by one (`benchmarks/train_step.py
--against "--graph off"`). What can be captured has static shapes and addresses and never asks the device for a value:
each step of dtgpt is written so. A replay launches the recorded kernels with the recorded arguments. Therefore inputs
are copied to where the first ones lay, outputs are the same tensors each time, and whatever lies at a captured address
may neither be freed nor replaced.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dtgpt.parallel.engine import Graphs, Result
from dtgpt.util.errors import UserError

WARM_UP = 2  # steps that run as they are: kernels are built, libraries choose, communicators meet


class CapturedGraphs(Graphs):
    """Pieces by name, captured in the order in which the first step after the warm-up meets them.

    They share their memory: what one piece frees the next one uses, so that they must always run in that order.
    """

    def __init__(self, enabled: bool = True):
        self.enabled = enabled
        self._steps = 0
        self._pool = torch.cuda.graph_pool_handle() if enabled else None
        if enabled:
            _leave_default_stream()
        self._captured: dict[str, tuple[torch.cuda.CUDAGraph, Any, tuple[Tensor | None, ...]]] = {}

    @property
    def captured(self) -> bool:
        return bool(self._captured)

    def release(self) -> None:
        """Forget the pieces: a communicator waits at its end for graphs that hold it."""
        self.restart()
        self.enabled = False

    def restart(self) -> None:
        """Forget the pieces; they are captured anew after another warm-up."""
        for graph, _, _ in self._captured.values():
            graph.reset()
        self._captured.clear()
        self._steps = 0
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def next_step(self) -> None:
        self._steps += 1

    def run(self, name: str, work: Callable[..., Result], *inputs: Tensor | None) -> Result:
        """Once captured, copy the inputs to where the first ones lay, and return the same tensors each time. Raises
        UserError where an input has another form than the first one."""
        if not self.enabled or self._steps <= WARM_UP:
            return work(*inputs)
        if name not in self._captured:
            places = tuple(None if value is None else value.clone() for value in inputs)
            stream = torch.cuda.current_stream()
            self._captured[name] = *capture(work, places, self._pool, "use --graph off", stream), places
        graph, result, places = self._captured[name]
        check_forms(name, places, inputs)  # else a graph would go on with old values, or repeat a row
        for place, value in zip(places, inputs, strict=True):
            if place is not None and value is not None:
                place.copy_(value)
        graph.replay()
        return result


def check_forms(name: str, places: tuple[Tensor | None, ...], inputs: tuple[Tensor | None, ...]) -> None:
    """Raise UserError where an input of a piece is not of the type and the shape of the one that was captured, or is
    there where that was not."""
    for index, (place, value) in enumerate(zip(places, inputs, strict=True)):
        if place is value is None:
            continue
        if place is None or value is None or (place.dtype, place.shape) != (value.dtype, value.shape):
            raise UserError(
                f"input {index} of the CUDA graph '{name}' is {_form(value)}, and was {_form(place)} when it was "
                "captured, but steps under graphs have batches of one form; mend what makes them, or use --graph off"
            )


def _form(value: Tensor | None) -> str:
    return "none" if value is None else f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def capture(
    work: Callable[..., Result],
    places: tuple[Tensor | None, ...],
    pool: Any,
    remedy: str,
    stream: torch.cuda.Stream | None = None,
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Return a graph of `work(*places)`, and what the work returned: its memory is that of the `pool`. `stream`: to
    capture on; None: a stream of torch's own. Raise UserError, with the remedy, where the work cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    # Threads of NCCL and of the batches to come go on calling CUDA: only this one may not.
    options: dict[str, Any] = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
    failure = None
    try:
        with _no_collection(), torch.cuda.graph(graph, **options):
            try:
                result = work(*places)
            except RuntimeError as error:
                failure = error
                raise
    except RuntimeError as error:
        failure = failure or error  # what the end of a broken capture raises hides the cause
        if isinstance(failure, torch.OutOfMemoryError):
            raise failure from None
        reason = str(failure).splitlines()[0]
        raise UserError(f"a step cannot be captured as a CUDA graph ({reason}); {remedy}") from failure
    return graph, result


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no cycles of objects meanwhile: what they hold, such as memory that ranks share, may be freed by calls
    that a capture forbids, and the process would end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _leave_default_stream() -> None:
    """The default stream cannot be captured, and autograd adds up gradients on the stream where a parameter was first
    used: all that a run does is therefore queued on one stream of its own."""
    default = torch.cuda.default_stream()
    if torch.cuda.current_stream() == default:
        own = torch.cuda.Stream()
        own.wait_stream(default)
        torch.cuda.set_stream(own)

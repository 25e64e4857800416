"""Decode steps as CUDA graphs: one for each number of rows and variant, captured when first needed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dtgpt.ops.sampling.sequences import Sampled, Variant
from dtgpt.util.errors import UserError

WARM_UP = 2  # runs before a capture: kernels are built, libraries choose, communicators meet


class StepGraphs:
    """Calls of `decode(slots [B], variant)`. Graphs share one pool of memory, so that they run one at a time."""

    def __init__(self, decode: Callable[[Tensor, Variant], Sampled], scratch: int, device: torch.device):
        """`scratch`: a slot whose state no sequence needs."""
        self._decode, self._scratch, self._device = decode, scratch, device
        self._captured: dict[tuple[int, Variant], tuple[torch.cuda.CUDAGraph, Tensor, Sampled]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, slots: Tensor, variant: Variant) -> Sampled:
        """Return what `decode` does, in memory of its own."""
        key = (len(slots), variant)
        if key not in self._captured:
            self._captured[key] = self._capture(len(slots), variant)
        graph, place, sampled = self._captured[key]
        place.copy_(slots)
        graph.replay()
        return Sampled(*(value.clone() for value in sampled))

    def release(self) -> None:
        """Forget the graphs: a communicator waits at its end for graphs that hold it."""
        for graph, _, _ in self._captured.values():
            graph.reset()
        self._captured.clear()

    def _capture(self, rows: int, variant: Variant) -> tuple[torch.cuda.CUDAGraph, Tensor, Sampled]:
        place = torch.full((rows,), self._scratch, dtype=torch.int64, device=self._device)
        for _ in range(WARM_UP):
            self._decode(place, variant)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        options: dict[str, Any] = {"pool": self._pool, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.graph(graph, **options):
                sampled = self._decode(place, variant)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"a decode step cannot be captured as a CUDA graph ({reason})") from error
        return graph, place, sampled

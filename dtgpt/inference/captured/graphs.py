"""Steps of inference as CUDA graphs, captured when first needed."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from dtgpt.parallel.graphs.captured import capture

Tensors = tuple[Tensor, ...]

WARM_UP = 2  # runs before a capture: kernels are compiled, libraries choose algorithms, communicators connect


class StepGraphs:
    """CUDA graphs by name, each with inputs of fixed shapes. They share one pool of memory: one runs at a time."""

    def __init__(self) -> None:
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any, Tensors]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, name: Hashable, work: Callable[..., Any], inputs: Tensors, idle: Callable[[], Tensors]) -> Any:
        """Return what `work(*inputs)` does, in memory that the next call overwrites. `idle`: makes inputs of the same
        shapes for the runs before the capture, which change only the scratch slot."""
        if name not in self._captured:
            self._captured[name] = self._capture(work, idle())
        graph, result, places = self._captured[name]
        for place, value in zip(places, inputs, strict=True):
            place.copy_(value)
        graph.replay()
        return result

    def release(self) -> None:
        """Forget the graphs: a communicator waits at its end for graphs that hold it."""
        for graph, _, _ in self._captured.values():
            graph.reset()
        self._captured.clear()

    def _capture(self, work: Callable[..., Any], places: Tensors) -> tuple[torch.cuda.CUDAGraph, Any, Tensors]:
        for _ in range(WARM_UP):
            work(*places)
        torch.cuda.synchronize()
        return *capture(work, places, self._pool, "use device=cpu"), places

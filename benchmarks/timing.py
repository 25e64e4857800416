"""Rates of an H200, measured, and a graph of what is to be timed."""

from collections.abc import Callable

import torch

COPY_RATE = 4.28e12  # bytes per second that a large copy moves on an H200, read and written
MATRIX_RATE = 790e12  # bf16 FLOP/s of a large product of random matrices there


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of one run, after three to warm up, so that launches cost nothing of the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph

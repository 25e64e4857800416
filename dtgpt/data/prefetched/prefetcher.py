"""The tensors of the next step, made by a thread during a step."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from dtgpt.data.dataset import Batches, Make


class Prefetcher(Batches):
    """The tensors of a step on the device. With CUDA a thread prepares those of the next step in pinned memory; where
    no thread can be started, each step's are prepared when they are taken."""

    def __init__(self, make: Make, device: torch.device):
        super().__init__(make, device)
        self._thread = ThreadPoolExecutor(1, "batches") if device.type == "cuda" else None
        self._next: tuple[int, Future] | None = None

    def take(self, step: int) -> tuple[Tensor, ...]:
        """Return the tensors of `step`, and begin with the next step. Never waits for the device."""
        if self.device.type == "cpu" and self._thread is None:
            return self.make(step)
        begun, self._next = self._next, None
        pinned = begun[1].result() if begun and begun[0] == step else self._pinned(step)
        if self._thread is not None:
            try:
                self._next = step + 1, self._thread.submit(self._pinned, step + 1)
            except RuntimeError:  # the system refuses the thread, which only the first call starts
                self._thread = None
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in pinned)

    def _pinned(self, step: int) -> tuple[Tensor, ...]:
        return tuple(tensor.pin_memory() for tensor in self.make(step))

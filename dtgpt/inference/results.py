"""Transfer of draws and scores between ranks and to the host."""

from typing import Generic, TypeVar

import torch
from torch import Tensor

from dtgpt.ops.sampling.scores import Scores
from dtgpt.ops.sampling.sequences import Sampled

DTYPES = {
    Sampled: (torch.int64, torch.float32, torch.int64, torch.float32),
    Scores: (torch.float32, torch.bool, torch.int64, torch.float32),
}
R = TypeVar("R", Sampled, Scores)


def pack(results: Sampled | Scores) -> Tensor:
    """Return two fields `[..., M]` and two `[..., M, n]` in one tensor `[..., M, 2 + 2 n]` of float64, which holds ids
    and fp32 numbers alike."""
    first, second, *likeliest = results
    return torch.cat([part.double() for part in (first[..., None], second[..., None], *likeliest)], dim=-1)


def unpack(kind: type[R], packed: Tensor) -> R:
    """Return what `pack` packed."""
    parts = packed[..., 0], packed[..., 1], *packed[..., 2:].tensor_split(2, dim=-1)
    return kind(*(part.to(dtype) for part, dtype in zip(parts, DTYPES[kind], strict=True)))


def empty_packed(rows: int, alternatives: int, device: torch.device) -> Tensor:
    """Return memory for the packed results of `rows` tokens, uninitialised."""
    return torch.empty(rows, 2 + 2 * alternatives, dtype=torch.float64, device=device)


class Pending(Generic[R]):
    """Results whose copy to the host is under way."""

    def __init__(self, results: R):
        self._kind: type[R] = type(results)
        self._packed = pack(results)
        self._done: torch.cuda.Event | None = None
        if self._packed.is_cuda:
            pinned = torch.empty(self._packed.shape, dtype=self._packed.dtype, pin_memory=True)
            self._packed = pinned.copy_(self._packed, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> R:
        """Return the results on the CPU."""
        if self._done is not None:
            self._done.synchronize()
        return unpack(self._kind, self._packed)

"""What a step makes of tokens: ids and log-probabilities, between ranks and on the way to the host."""

from typing import NamedTuple

import torch
from torch import Tensor


class Results(NamedTuple):
    """Numbers of M tokens of a prompt, of B sequences, or of B sequences times R steps; n likeliest tokens each."""

    first: Tensor  # int64 [M], [B] or [B, R]: of a prompt, whether each token is the likeliest; else the tokens drawn
    logprobs: Tensor  # fp32, likewise
    top_ids: Tensor  # int64 [M, n], [B, n] or [B, R, n]
    top_logprobs: Tensor  # fp32, likewise

    def pack(self) -> Tensor:
        """Return all in one tensor `[..., 2 + 2 n]` of float64, which holds ids and fp32 numbers alike."""
        columns = (self.first[..., None], self.logprobs[..., None], self.top_ids, self.top_logprobs)
        return torch.cat([column.double() for column in columns], dim=-1)

    @classmethod
    def unpack(cls, packed: Tensor) -> "Results":
        """Return what `pack` packed."""
        top_ids, top_logprobs = packed[..., 2:].tensor_split(2, dim=-1)
        return cls(packed[..., 0].long(), packed[..., 1].float(), top_ids.long(), top_logprobs.float())


def empty_packed(rows: int, alternatives: int, device: torch.device) -> Tensor:
    """Return memory for packed results of `rows` tokens, uninitialised."""
    return torch.empty(rows, 2 + 2 * alternatives, dtype=torch.float64, device=device)


class Pending:
    """Results on their way to the host."""

    def __init__(self, results: Results):
        packed = results.pack()
        self._packed, self._done = packed, None
        if packed.is_cuda:
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> Results:
        """Return the results on the CPU."""
        if self._done is not None:
            self._done.synchronize()
        return Results.unpack(self._packed)

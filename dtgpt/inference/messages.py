"""Commands from rank 0 to the other ranks: int64 tensors on the CPU, broadcast over gloo."""

from collections.abc import Sequence
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.parallel.mesh import Mesh

HEADER = 64  # numbers of the first message: kind, length of the payload, and the beginning of the payload
INLINE = HEADER - 2


class Kind(IntEnum):
    """Commands, each with its payload."""

    PREFILL = 1  # slot, first, *ids
    SCORE = 2  # slot, first, alternatives, *ids
    START = 3  # slot, *payload of the slot's state
    COPY = 4  # length, *sources, *targets
    DECODE = 5  # steps, *variant, *slots
    ASSIGN = 6  # *slots, *tokens
    RELEASE = 7  # nothing
    PREFILL_BATCH = 8  # count, *slots, *lengths, *ids of all prompts
    PING = 9  # nothing; every rank meets the others
    KEYS = 10  # *slots, *the two words of each slot's key


class Channel:
    """Sends commands from rank 0 to the other ranks. All ranks create it at the same point."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._group = mesh.commands

    def send(self, kind: Kind, payload: Sequence[int] | Tensor = ()) -> None:
        """Broadcast a command from rank 0. Does nothing in a single process."""
        if self._group is None:
            return
        numbers = torch.as_tensor(payload, dtype=torch.int64)
        first = torch.zeros(HEADER, dtype=torch.int64)
        first[0], first[1] = kind, len(numbers)
        first[2 : 2 + len(numbers)] = numbers[:INLINE]
        dist.broadcast(first, 0, group=self._group)
        if len(numbers) > INLINE:
            dist.broadcast(numbers[INLINE:].contiguous(), 0, group=self._group)

    def receive(self) -> tuple[Kind, list[int]]:
        """Return the next command of rank 0, with its payload."""
        first = torch.empty(HEADER, dtype=torch.int64)
        dist.broadcast(first, 0, group=self._group)
        kind, length, *payload = first.tolist()
        if length > INLINE:
            rest = torch.empty(length - INLINE, dtype=torch.int64)
            dist.broadcast(rest, 0, group=self._group)
            payload += rest.tolist()
        return Kind(kind), payload[:length]

    def meet(self) -> None:
        """Wait until all ranks have called this. Does nothing in a single process."""
        if self._group is not None:
            dist.all_reduce(torch.zeros(1), group=self._group)

    def close(self) -> None:
        """Close the channel on this rank. Ranks that wait for a command fail at once."""
        self._group = None
        self._mesh.close_commands()

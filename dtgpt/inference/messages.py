"""Commands from rank 0 to the other ranks: int64 tensors on the CPU, broadcast over gloo."""

from collections.abc import Sequence
from enum import IntEnum

import torch
import torch.distributed as dist

from dtgpt.parallel.mesh import Mesh

HEADER = 64  # numbers of the first message: kind, length of the payload, and the beginning of the payload
INLINE = HEADER - 2


class Kind(IntEnum):
    PREFILL = 1  # slot, first, *ids
    SCORE = 2  # slot, first, alternatives, *ids
    START = 3  # slot, *payload of the slot's state
    COPY = 4  # length, *sources, *targets
    DECODE = 5  # steps, *variant, *slots
    ASSIGN = 6  # *slots, *tokens
    RELEASE = 7  # nothing
    FAIL = 8  # nothing


class Channel:
    """The way of commands from rank 0 to the others. All ranks make it at the same point."""

    def __init__(self, mesh: Mesh):
        self._group = mesh.commands

    def send(self, kind: Kind, payload: Sequence[int] = ()) -> None:
        """Broadcast a command from rank 0; nothing where it is alone."""
        if self._group is None:
            return
        numbers = [kind, len(payload), *payload]
        first = torch.tensor(numbers[:HEADER] + [0] * (HEADER - len(numbers)), dtype=torch.int64)
        dist.broadcast(first, 0, group=self._group)
        if len(payload) > INLINE:
            dist.broadcast(torch.tensor(payload[INLINE:], dtype=torch.int64), 0, group=self._group)

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

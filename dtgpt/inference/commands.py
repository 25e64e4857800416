"""What rank 0 lets all ranks do, and what it tells them: commands, and values of a call.

Rank 0 alone knows the jobs. A command is a function of a rank's step and of numbers, which reach the other ranks as
JSON over gloo, as values of a call do. Nothing is a pickle, which would execute what arrives. Every rank executes each
command: so all of them run the same passes in the same order.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.inference.step import Pending, Step
from dtgpt.ops.sampling.sequences import Sampled, Variant
from dtgpt.parallel.mesh import Mesh
from dtgpt.util import seams
from dtgpt.util.errors import UserError
from dtgpt.util.peers import peers

INLINE = 512  # bytes of a first message, which holds the length of what is told, and all of a short one
LENGTH = 8  # bytes of the length
K = TypeVar("K")


def read(step: Step, slots: Sequence[int], prompts: Sequence[Sequence[int]], first: int) -> None:
    """Read prompts, or parts of them from position `first` on, into slots."""
    step.read(slots, prompts, first)


def begin(step: Step, slot: int, payload: Tensor | list[int]) -> None:
    """Begin a sequence, from what `SlotState.encode` made, in a slot whose cache has all of its tokens but the last."""
    step.cache.state.set(slot, torch.as_tensor(payload))


def copy(
    step: Step, sources: Sequence[int], targets: Sequence[int], length: int, keys: Sequence[Sequence[int]]
) -> None:
    """Copy the first `length` positions, and the state, of slots to others, all at once. keys: two words for each of
    the targets, whose draws belong to them from now on; none: to the key that was copied."""
    step.cache.copy(sources, targets, length)
    if keys:
        step.cache.state.set_keys(targets, keys)


def decode(step: Step, slots: Sequence[int], steps: int, variant: Sequence[Any]) -> Pending[Sampled]:
    """Draw the next tokens of slots. variant: the fields of a `Variant`."""
    return step.decode(slots, steps, Variant(*variant))


def ping(step: Step) -> None:
    """Wait for all ranks: sending alone tells nothing of a rank that hangs."""
    if step.mesh.commands is not None:
        dist.all_reduce(torch.zeros(1), group=step.mesh.commands)


def release(step: Step) -> None:
    """Leave the stages as they were; `follow` returns then."""
    step.detach()


@cache
def known_commands() -> tuple[Callable[..., Any], ...]:
    """Return all commands, with those of capabilities, in the same order on every rank: one is sent as its index."""
    return read, begin, copy, decode, ping, release, *seams.listed("rank_commands")


def _plain(value: Any) -> Any:
    """Return what JSON has in place of a tensor, of a range, or of the results of a call."""
    if isinstance(value, range):
        return list(value)
    return value.tolist() if isinstance(value, Tensor) else vars(value)


def _told(group: dist.ProcessGroup | None, is_first: bool, value: Any = None) -> Any:
    """Return on every rank of the group, as JSON has it, what is the `value` on the first one."""
    body = json.dumps(value, default=_plain).encode() if is_first else b""
    first = torch.zeros(INLINE, dtype=torch.uint8)
    if is_first:
        first[: LENGTH + len(body)] = _octets(len(body).to_bytes(LENGTH, "big") + body[: INLINE - LENGTH])
    dist.broadcast(first, 0, group=group)
    length, *octets = first.numpy().tobytes()[:LENGTH], first.numpy().tobytes()[LENGTH:]
    if (size := int.from_bytes(length, "big")) > INLINE - LENGTH:
        rest = _octets(body[INLINE - LENGTH :]) if is_first else torch.empty(size - INLINE + LENGTH, dtype=torch.uint8)
        dist.broadcast(rest, 0, group=group)
        octets.append(rest.numpy().tobytes())
    return json.loads(b"".join(octets)[:size])


def _octets(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Channel:
    """Carries commands from rank 0 to the other ranks. All ranks create it at the same point."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._group = mesh.commands

    def send(self, command: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Broadcast a command from rank 0. Does nothing in a single process."""
        if self._group is not None:
            _told(self._group, True, [known_commands().index(command), arguments])

    def receive(self) -> tuple[Callable[..., Any], list[Any]]:
        """Return the next command of rank 0, and its arguments."""
        index, arguments = _told(self._group, False)
        return known_commands()[index], arguments

    def close(self) -> None:
        """Close the channel on this rank. Ranks that wait for a command fail at once."""
        self._group = None
        self._mesh.close_commands()

    def failures_shared(self, timeout: float) -> AbstractContextManager[None]:
        """Let the other ranks know where this one fails, and raise UserError where another one has. `timeout`: seconds
        that collectives of the mesh wait."""
        return peers(self._mesh.world).failures_shared(self._mesh.rank, timeout, self.close)


def follow(step: Step, channel: Channel) -> None:
    """Execute the commands of rank 0, until it releases this rank."""
    command = None
    while command is not release:
        command, arguments = channel.receive()
        command(step, *arguments)


def broadcast_json(mesh: Mesh, value: Any = None) -> Any:
    """Return the value of rank 0 on every rank: texts, numbers, results, and lists and dicts of these."""
    if mesh.world == 1:
        return value
    return _told(mesh.commands, mesh.rank == 0, value)


def told_by_rank_0(mesh: Mesh, work: Callable[[], tuple[Any, K]]) -> tuple[Any, tuple[K] | None]:
    """Call `work` on rank 0, and return the first of its two values on every rank. The second one stays there: it comes
    as (value,), None on the other ranks. Raise a UserError of `work` on every rank."""
    told = kept = sentence = None
    if mesh.rank == 0:
        try:
            told, value = work()
            kept = (value,)
        except UserError as error:
            if mesh.world == 1:
                raise
            sentence = str(error)
    told, sentence = broadcast_json(mesh, [told, sentence])
    if sentence is not None:
        raise UserError(sentence)
    return told, kept

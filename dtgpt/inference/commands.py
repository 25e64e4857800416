"""What rank 0 lets all ranks do, and what it tells them: commands, and values of a call.

Rank 0 alone knows the jobs. A command is a function of a rank's step and of numbers, which reach the other ranks as
int64 over gloo; a value of a call does as JSON. Nothing is a pickle, which would execute what arrives. Every rank
executes each command: so all of them run the same passes in the same order.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, islice
from typing import Any, TypeVar, get_args, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.inference.step import Pending, Step
from dtgpt.ops.sampling.sequences import Sampled, Variant
from dtgpt.parallel.mesh import Mesh
from dtgpt.util import seams
from dtgpt.util.errors import UserError
from dtgpt.util.peers import peers

FAILURE = "inference failure"  # the name under which the rank that fails first leaves its reason
INLINE = 63  # numbers of a command that its first message holds, behind their count
K = TypeVar("K")


def read(step: Step, slots: Sequence[int], prompts: Sequence[Sequence[int]], first: int) -> None:
    """Read prompts, or parts of them from position `first` on, into slots."""
    step.read(slots, prompts, first)


def begin(step: Step, slot: int, payload: Tensor) -> None:
    """Begin a sequence, from what `SlotState.encode` made, in a slot whose cache has all of its tokens but the last."""
    step.cache.state.set(slot, payload)


def copy(
    step: Step, sources: Sequence[int], targets: Sequence[int], length: int, keys: Sequence[Sequence[int]]
) -> None:
    """Copy the first `length` positions, and the state, of slots to others, all at once. keys: two words for each of
    the targets, whose draws belong to them from now on; none: to the key that was copied."""
    step.cache.copy(sources, targets, length)
    if keys:
        step.cache.state.set_keys(targets, keys)


def assign(step: Step, slots: Sequence[int], tokens: Sequence[int]) -> None:
    """Replace the token that each slot has drawn last."""
    step.cache.state.assign(slots, tokens)


def decode(step: Step, slots: Sequence[int], steps: int, variant: Variant) -> Pending[Sampled]:
    """Draw the next tokens of slots."""
    return step.decode(slots, steps, variant)


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
    return read, begin, copy, assign, decode, ping, release, *(scorer.command for scorer in seams.listed("scorers"))


def to_numbers(value: Any) -> list[int]:
    """Return a value as numbers: a whole number is itself, a NamedTuple its fields, and of any other sequence its
    length comes first."""
    if isinstance(value, int):
        return [int(value)]
    if hasattr(value, "_fields"):
        return list(chain.from_iterable(map(to_numbers, value)))
    parts = value.tolist() if isinstance(value, Tensor) else list(value)
    numbers = parts if not parts or isinstance(parts[0], int) else chain.from_iterable(map(to_numbers, parts))
    return [len(parts), *numbers]


def from_numbers(kind: Any, numbers: Iterator[int]) -> Any:
    """Return the value of a type of which these are the numbers."""
    if kind in (int, bool):
        return kind(next(numbers))
    if hasattr(kind, "_fields"):
        return kind(*(from_numbers(part, numbers) for part in _types_of(kind)))
    item, count = (int,) if kind is Tensor else get_args(kind), next(numbers)
    parts = list(islice(numbers, count)) if item == (int,) else [from_numbers(item[0], numbers) for _ in range(count)]
    return torch.tensor(parts, dtype=torch.int64) if kind is Tensor else parts


@cache
def _types_of(kind: Any) -> list[Any]:
    """Return the types of the fields of a NamedTuple, or of what a command takes beside the step."""
    return [type_ for name, type_ in get_type_hints(kind).items() if name not in ("step", "return")]


class Channel:
    """Carries commands from rank 0 to the other ranks. All ranks create it at the same point."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._group = mesh.commands

    def send(self, command: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Broadcast a command from rank 0. Does nothing in a single process."""
        if self._group is None:
            return
        sent = [known_commands().index(command), *chain.from_iterable(map(to_numbers, arguments))]
        numbers = torch.tensor(sent, dtype=torch.int64)
        first = torch.zeros(1 + INLINE, dtype=torch.int64)
        first[0], first[1 : 1 + len(numbers)] = len(numbers), numbers[:INLINE]
        dist.broadcast(first, 0, group=self._group)
        if len(numbers) > INLINE:
            dist.broadcast(numbers[INLINE:].contiguous(), 0, group=self._group)

    def receive(self) -> tuple[Callable[..., Any], list[Any]]:
        """Return the next command of rank 0, and its arguments."""
        first = torch.empty(1 + INLINE, dtype=torch.int64)
        dist.broadcast(first, 0, group=self._group)
        length, *numbers = first.tolist()
        if length > INLINE:
            rest = torch.empty(length - INLINE, dtype=torch.int64)
            dist.broadcast(rest, 0, group=self._group)
            numbers += rest.tolist()
        index, *found = numbers
        command, left = known_commands()[index], iter(found)
        return command, [from_numbers(kind, left) for kind in _types_of(command)]

    def close(self) -> None:
        """Close the channel on this rank. Ranks that wait for a command fail at once."""
        self._group = None
        self._mesh.close_commands()

    @contextmanager
    def failures_shared(self, timeout: float) -> Iterator[None]:
        """Where this rank fails, leave its reason for the other ranks, and close the channel, for which they wait.
        Where another rank failed first, raise a UserError with the reason of that one. `timeout`: seconds that
        collectives of the mesh wait."""
        mesh = self._mesh

        def remedy() -> str:
            reason = mesh.posted(FAILURE)
            return f"start all of them again{f' ({reason})' if reason else ''}"

        try:
            with peers(mesh.world).losses_as_user_errors(timeout, remedy):
                yield
        except BaseException as error:
            if mesh.world > 1:
                if mesh.posted(FAILURE) is None:
                    mesh.post(FAILURE, f"rank {mesh.rank}: {error or repr(error)}")
                self.close()
            raise


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
    body = torch.frombuffer(
        bytearray(json.dumps(value, default=vars).encode() if mesh.rank == 0 else b" "), dtype=torch.uint8
    )
    size = torch.tensor(len(body))
    dist.broadcast(size, 0, group=mesh.commands)
    if mesh.rank:
        body = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(body, 0, group=mesh.commands)
    return json.loads(body.numpy().tobytes())


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

"""Commands of rank 0 to the other ranks."""

import time

import pytest
import torch

from dtgpt.config.plan import Plan
from dtgpt.inference.commands import (
    Channel,
    _types_of,
    assign,
    begin,
    copy,
    decode,
    follow,
    from_numbers,
    known_commands,
    read,
    release,
    to_numbers,
)
from dtgpt.inference.commands import ping as meet
from dtgpt.ops.sampling.sequences import Variant
from dtgpt.parallel.mesh import Mesh
from tests.support.ranks import pool

HELD = 0.7  # seconds that a rank does not answer


class _NoModel:
    """A step of a rank that only answers."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh

    def detach(self) -> None: ...


def ping(world: int) -> float:
    """Return the seconds that a ping of rank 0 took, where the last rank is held up."""
    mesh = Mesh(Plan(tp=world).for_world(world), torch.device("cpu"))
    channel, begin = Channel(mesh), time.monotonic()
    if mesh.rank:
        time.sleep(HELD if mesh.rank == world - 1 else 0.0)
        follow(_NoModel(mesh), channel)
        return 0.0
    channel.send(meet, [])
    meet(_NoModel(mesh))
    seconds = time.monotonic() - begin
    channel.send(release, [])
    return seconds


def test_a_ping_waits_for_the_answer_of_every_rank():
    """A message that is sent alone would lie in a buffer of a rank that is suspended."""
    assert pool().run(3, ping, 3)[0] > HELD / 2


EXAMPLES = (
    (read, [3, 1], [[5, 6, 7], [8]], 0), (read, [0], [list(range(100))], 4), (begin, 1, torch.tensor([-1, 2**62])),
    (copy, [1], [2], 3, []), (copy, [1, 2], [4, 5], 3, [[1, 2], [3, 4]]), (assign, [7], [9]), (assign, [], []),
    (decode, [0, 2], 8, Variant(filters=True, ngram=4, alternatives=2)), (meet,), (release,),
)  # fmt: skip


def sent_and_received(command, *arguments):
    assert command in known_commands()
    numbers = iter([number for argument in arguments for number in to_numbers(argument)])
    found = [from_numbers(kind, numbers) for kind in _types_of(command)]
    assert next(numbers, None) is None
    return found


@pytest.mark.parametrize("command, arguments", [(command, given) for command, *given in EXAMPLES])
def test_a_command_comes_back_from_its_numbers(command, arguments):
    found = sent_and_received(command, *arguments)
    if command is begin:
        assert found[0] == arguments[0] and torch.equal(found[1], arguments[1])
    else:
        assert found == arguments
    if command is decode:
        assert [type(part) for part in found[2]] == [type(part) for part in arguments[2]]

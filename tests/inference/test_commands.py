"""Commands of rank 0 to the other ranks."""

import time

import pytest
import torch

from dtgpt.config.plan import Plan
from dtgpt.inference.commands import (
    Assign,
    Begin,
    Channel,
    Copy,
    Decode,
    Ping,
    Read,
    Release,
    decode,
    encode,
    follow,
    known_commands,
)
from dtgpt.ops.sampling.sequences import Variant
from dtgpt.parallel.mesh import Mesh
from tests.support.ranks import pool

HELD = 0.7  # seconds that a rank does not answer


class _NoModel:
    """A step of a rank that only answers."""

    def detach(self) -> None: ...


def ping(world: int) -> float:
    """Return the seconds that a ping of rank 0 took, where the last rank is held up."""
    mesh = Mesh(Plan(tp=world).for_world(world), torch.device("cpu"))
    channel, begin = Channel(mesh), time.monotonic()
    if mesh.rank:
        time.sleep(HELD if mesh.rank == world - 1 else 0.0)
        follow(_NoModel(), channel)
        return 0.0
    channel.send(Ping())
    channel.meet()
    seconds = time.monotonic() - begin
    channel.send(Release())
    return seconds


def test_a_ping_waits_for_the_answer_of_every_rank():
    """A message that is sent alone would lie in a buffer of a rank that is suspended."""
    assert pool().run(3, ping, 3)[0] > HELD / 2


EXAMPLES = (
    Read([3, 1], [[5, 6, 7], [8]]), Read([0], [list(range(100))], first=4), Begin(1, torch.tensor([-1, 2**62])),
    Copy([1], [2], 3, []), Copy([1, 2], [4, 5], 3, [[1, 2], [3, 4]]), Assign([7], [9]), Assign([], []),
    Decode([0, 2], 8, Variant(filters=True, ngram=4, alternatives=2)), Ping(), Release(),
)  # fmt: skip


@pytest.mark.parametrize("command", EXAMPLES, ids=lambda command: type(command).__name__)
def test_a_command_comes_back_from_its_numbers(command):
    numbers = iter(encode(command))
    found = decode(type(command), numbers)
    assert type(command) in known_commands() and next(numbers, None) is None
    if isinstance(command, Begin):
        assert found.slot == command.slot and torch.equal(found.payload, command.payload)
    else:
        assert found == command
    if isinstance(command, Decode):
        assert [type(part) for part in found.variant] == [type(part) for part in command.variant]

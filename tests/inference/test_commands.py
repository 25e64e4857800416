"""Commands of rank 0 to the other ranks."""

import time
from types import SimpleNamespace

import pytest
import torch

from dtgpt.config.plan import Plan
from dtgpt.inference.commands import (
    Channel,
    begin,
    copy,
    decode,
    follow,
    known_commands,
    read,
    release,
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
    (copy, [1], [2], 3, []), (copy, [1, 2], [4, 5], 3, [[1, 2], [3, 4]]),
    (decode, [0, 2], 8, Variant(filters=True, ngram=4, alternatives=2)), (meet,), (release,),
)  # fmt: skip


LONG = [(read, [1], [list(range(count))], 0) for count in (100, 150)]  # within a first message, and beyond


def tell(world: int, index: int, given: list) -> tuple | None:
    """Return the command that arrives, with its arguments; None on rank 0, which sends it."""
    channel = Channel(Mesh(Plan(tp=world).for_world(world), torch.device("cpu")))
    if channel._mesh.rank == 0:
        return channel.send(known_commands()[index], given)
    command, arrived = channel.receive()
    return known_commands().index(command), arrived


@pytest.mark.parametrize("command, given", [(command, given) for command, *given in (*EXAMPLES, *LONG)])
def test_a_command_arrives_as_it_was_sent(command, given):
    index = known_commands().index(command)
    sent = [part.tolist() if isinstance(part, torch.Tensor) else part for part in given]
    _, *found = pool().run(3, tell, 3, index, given)
    assert found == [(index, [list(part) if isinstance(part, Variant) else part for part in sent])] * 2


class _Held:
    """A step that keeps what it is asked for."""

    def __init__(self):
        self.asked, self.cache = [], SimpleNamespace(state=SimpleNamespace(set=lambda *given: self.asked.append(given)))

    def decode(self, *given) -> None:
        self.asked.append(given)


def test_a_variant_and_a_payload_are_made_of_what_arrives():
    step, variant = _Held(), Variant(filters=True, ngram=4, alternatives=2)
    decode(step, [0], 8, list(variant))
    begin(step, 1, [-1, 2**62])
    (_, _, found), (_, payload) = step.asked
    assert type(found) is Variant and found == variant and torch.equal(payload, torch.tensor([-1, 2**62]))

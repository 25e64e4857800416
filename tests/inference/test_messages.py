"""Commands of rank 0 to the other ranks."""

import time

import torch

from dtgpt.config.plan import Plan
from dtgpt.inference.leader import Leader, follow
from dtgpt.inference.messages import Channel
from dtgpt.parallel.mesh import Mesh
from tests.support.ranks import pool

HELD = 0.7  # seconds that a rank does not answer


class _NoModel:
    """A runner of a rank that only answers."""

    def detach(self) -> None: ...


def ping(world: int) -> float:
    """Return the seconds that a ping of rank 0 took, where the last rank is held up."""
    mesh = Mesh(Plan(tp=world).for_world(world), torch.device("cpu"))
    channel, begin = Channel(mesh), time.monotonic()
    if mesh.rank:
        time.sleep(HELD if mesh.rank == world - 1 else 0.0)
        follow(_NoModel(), channel)
        return 0.0
    leader = Leader(_NoModel(), channel)
    leader.ping()
    seconds = time.monotonic() - begin
    leader.release()
    return seconds


def test_a_ping_waits_for_the_answer_of_every_rank():
    """A message that is sent alone would lie in a buffer of a rank that is suspended."""
    assert pool().run(3, ping, 3)[0] > HELD / 2

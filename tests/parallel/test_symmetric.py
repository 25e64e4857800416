"""Which ranks may write to each other's memory."""

import socket
from types import SimpleNamespace

import pytest
import torch

from dtgpt.parallel import symmetric
from dtgpt.parallel.symmetric import Device, symmetric_memory

HERE = socket.gethostname()
GPUS = [Device(HERE, "GPU-0", True), Device(HERE, "GPU-1", True)]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with three GPUs, of which the last one has no link to the others."""
    monkeypatch.setattr(symmetric, "may_share", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one != other and 2 not in (one, other))


@pytest.mark.parametrize(
    ("other", "reachable"),
    [
        (GPUS[1], True),
        (Device("elsewhere", "GPU-1", True), False),
        (GPUS[0], False),  # kernels of two ranks that wait for each other on one GPU might never end
        (Device(HERE, "GPU-1", False), False),
        (Device(HERE, "GPU-2", True), False),
        (Device(HERE, "GPU-9", True), False),  # this process does not see it
    ],
)
@pytest.mark.parametrize("own", [torch.device("cuda", 0), torch.device("cuda")], ids=str)
def test_ranks_reach_each_other_on_gpus_of_one_host_with_peer_access(own, other, reachable):
    assert symmetric._reachable([GPUS[0], other], own) is reachable


class Ranks:
    """A mesh of two ranks, of which this one is rank 0 and the other one answers as given."""

    device, tp_group = torch.device("cuda", 0), object()

    def __init__(self, fails: list[bool]):
        self.fails = iter(fails)

    def gather(self, value: tuple) -> list[tuple]:
        return [value, tuple(GPUS[1])]

    def any(self, flag: bool) -> bool:
        return next(self.fails) or flag


@pytest.mark.parametrize(
    ("fails", "usable", "error", "shared"),
    [
        ([False, False], True, None, True),
        ([True], True, None, False),  # the other rank's GPU reaches less
        ([False, True], True, None, False),  # the other rank could not share
        ([False], False, None, False),
        ([False, False], True, RuntimeError("no handle\nmore"), False),
    ],
)
def test_all_ranks_get_memory_or_none(monkeypatch, capsys, fails, usable, error, shared):
    def share(size: int, device: torch.device, group: object) -> str:
        if error:
            raise error
        return f"{size} bytes"

    monkeypatch.setattr(symmetric, "share_memory", share)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 1])
    found = symmetric_memory(Ranks(fails), Ranks.tp_group, 64, usable)
    assert found == ("64 bytes" if shared else None)
    printed = capsys.readouterr()
    assert ("no handle): NCCL" in printed.out + printed.err) is (error is not None)

"""Which ranks may write to each other's memory."""

import socket
from types import SimpleNamespace

import pytest
import torch

from dtgpt.parallel.shared_memory import arena
from dtgpt.parallel.shared_memory.arena import Device, share

HERE = socket.gethostname()
GPUS = [Device(HERE, "GPU-0", True), Device(HERE, "GPU-1", True)]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with three GPUs, of which the last one has no link to the others."""
    monkeypatch.setattr(arena, "may_share", lambda: True)
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
    assert arena._reachable([GPUS[0], other], own) is reachable


class Ranks:
    """A mesh of two ranks, of which this one is rank 0 and the other one answers as given."""

    device, tp_group = torch.device("cuda", 0), SimpleNamespace(rank=lambda: 0)

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
    def share_memory(size: int, device: torch.device, group: object) -> list[torch.Tensor]:
        if error:
            raise error
        return [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]

    monkeypatch.setattr(arena, "share_memory", share_memory)
    monkeypatch.setattr(arena, "TRITON", True)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 1])
    found = share(Ranks(fails), Ranks.tp_group, [64, 8], usable)
    assert (found is not None) is shared
    printed = capsys.readouterr()
    assert ("no handle): NCCL" in printed.out + printed.err) is (error is not None)


def test_areas_are_aligned_and_do_not_overlap(monkeypatch):
    memories = [torch.zeros(4096, dtype=torch.uint8) for _ in range(2)]
    monkeypatch.setattr(arena, "shared_memory", lambda everyone, group, size, usable: [m[:size] for m in memories])
    areas = share(Ranks([]), Ranks.tp_group, [512, 8, 1000])
    assert areas is not None and [len(area.own) for area in areas] == [512, 8, 1000]
    for rank, memory in enumerate(memories):
        begins = [int(area.addresses()[rank]) - memory.data_ptr() for area in areas]
        assert begins == [0, 512, 1024] and all(area.of_ranks[rank].storage_offset() % 512 == 0 for area in areas)
    assert (areas[0].rank, areas[0].ranks, areas[0].others) == (0, 2, [1])


def test_without_a_group_nothing_is_shared():
    assert share(Ranks([]), None, [64]) is None

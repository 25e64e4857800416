"""Which tensor-parallel ranks exchange numbers by kernels: all of them or none."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from dtgpt.inference.kernels import stages
from dtgpt.inference.kernels.stages import FusedStage
from dtgpt.parallel.shared_memory import arena
from dtgpt.parallel.shared_memory.arena import SWITCH
from dtgpt.parallel.shared_memory.transport import SHARED_MEMORY


class Group:
    """A process group."""


@pytest.fixture(autouse=True)
def process(monkeypatch) -> Group:
    """A process in its first group, which has made no exchange yet."""
    group = Group()
    monkeypatch.setattr(arena, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=group)))
    monkeypatch.setattr(stages, "_exchanges", {})
    monkeypatch.setattr(arena, "_first_group", None)
    made = replace(SHARED_MEMORY, open_exchange=lambda mesh, group: "exchange")
    monkeypatch.setattr(stages, "transport", lambda: made)
    monkeypatch.delenv(SWITCH, raising=False)
    return group


def exchange_of(monkeypatch, built: bool = True, others: tuple[bool, bool] | None = None, tp: int = 2):
    """What a stage exchanges by, where this rank could build kernels of few rows or not, and another rank answers as
    `others`; None: as this one."""

    def gather(vote: tuple[bool, bool]) -> list[tuple[bool, bool]]:
        return [vote, vote if others is None else others]

    monkeypatch.setattr(stages, "kernels_of_few_rows", lambda blocks, keys, ranks: "kernels" if built else None)
    stage = FusedStage.__new__(FusedStage)
    stage._exchange, stage._blocks, stage._keys = None, [], []
    stage._mesh = SimpleNamespace(tp_group=object(), plan=SimpleNamespace(tp=tp), gather=gather)
    stage.share_exchange()
    return stage._exchange


@pytest.mark.parametrize("built", [True, False])
def test_ranks_exchange_where_all_have_the_same_kernels(monkeypatch, built):
    assert exchange_of(monkeypatch, built) == "exchange"
    assert exchange_of(monkeypatch, built, others=(True, not built)) is None


def test_one_rank_that_may_not_keeps_all_from_it(monkeypatch):
    assert exchange_of(monkeypatch, others=(False, False)) is None
    monkeypatch.setenv(SWITCH, "0")
    assert exchange_of(monkeypatch) is None


def test_more_ranks_than_an_exchange_has_places_use_nccl(monkeypatch):
    assert exchange_of(monkeypatch, tp=8) == "exchange"
    assert exchange_of(monkeypatch, tp=16) is None


def test_a_second_process_group_uses_nccl(monkeypatch):
    assert exchange_of(monkeypatch) == exchange_of(monkeypatch) == "exchange"
    monkeypatch.setattr(arena.dist.group, "WORLD", Group())
    assert exchange_of(monkeypatch) is None
    assert dist.group.WORLD is None  # the real one was left alone

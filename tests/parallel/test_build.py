"""The order in which a stage is built, and the core without what capabilities add to it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dtgpt.parallel.build import BUILD, Building, Entry, entries
from dtgpt.parallel.collectives import Transport, transport
from dtgpt.util import seams
from tests.support.bodies_exact import bits_of_steps, bits_without_parallel_capabilities
from tests.support.ranks import pool

PLAIN = SimpleNamespace(products=None, compile=False, recompute="none")
LAST = Entry("last", lambda made: True, lambda part, made: None, after=BUILD[-1].name)


def test_an_entry_of_a_capability_comes_behind_the_one_that_it_names(monkeypatch):
    made = Building(settings=PLAIN, mesh=SimpleNamespace(cp_group="a group", own_devices=None))
    names = [entry.name for entry in entries(made)]
    assert names[names.index("added modules") + 1] == "dropout of slices"
    assert names[names.index("attention") + 1] == "heads of slices"
    assert [name for name in names if "slices" not in name] == [entry.name for entry in BUILD]
    assert entries(Building(settings=PLAIN, mesh=SimpleNamespace(cp_group=None, own_devices=None))) == list(BUILD)
    monkeypatch.setattr(seams, "listed", lambda seam, given: [LAST])
    assert [entry.name for entry in entries(made)] == [*(entry.name for entry in BUILD), "last"]


def test_without_a_capability_torch_distributed_is_the_way(monkeypatch):
    assert transport().reaches(2, 4) and not transport().reaches(2, 8)
    monkeypatch.setattr(seams, "listed", lambda seam: [])
    assert transport() == Transport() and not transport().reaches(2, 1) and not transport().serves()


@pytest.mark.slow(3)
@pytest.mark.parametrize("plan", ["dp2", "dp2_zero3", "tp2_sp", "pp2"])
def test_plans_have_their_bits_without_cut_samples_exact_sums_and_shared_memory(recipe, plan):
    made = replace(recipe, plan=plan, precision="bf16", steps=1)
    whole, core = (pool().run(2, work, made)[0] for work in (bits_of_steps, bits_without_parallel_capabilities))
    assert core == whole and len(core) > 20

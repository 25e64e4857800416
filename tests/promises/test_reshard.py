"""A checkpoint that any plan wrote is read under any other: bitwise, each element from the one rank that wrote it."""

import fcntl
import os
from collections import Counter
from dataclasses import replace

import pytest
import torch

from dtgpt.checkpoint.manifest import Checkpoint
from dtgpt.checkpoint.shard_file import read_header
from dtgpt.config.plan_choice import parse_plan
from dtgpt.parallel.layout import slices
from tests.support.bodies_checkpoint import load_each, train_and_save
from tests.support.ranks import pool
from tests.support.runs import change

pytestmark = pytest.mark.slow(9)

PLANS = ["single", "tp2", "tp4_sp", "pp2", "tp2_pp2", "dp2_zero1", "dp4_zero3", "dp2_tp2"]
RARE = ("tp4_sp", "dp2_tp2")  # as readers; the others read what they wrote in every run of the tests
FP32 = ("tp2", "tp2_pp2", "dp2_zero1")
SMALL = 100  # a LayerNorm is below, everything else above, so that the ranks that hold the same share it


def world_of(plan: str) -> int:
    return parse_plan(plan).world


@pytest.fixture
def recipe(recipe):
    shape = {"num_layers": 2, "num_heads": 4}
    return change(recipe, model=shape, micro_batch_size=2)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """One for all pytest workers of the session."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "plans"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def saved(recipe, root):
    """What gives the folder in which a plan left its checkpoint."""

    def save(plan):
        folder = root / plan
        with (root / f"{plan}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                folder.mkdir()
                pool().run(world_of(plan), train_and_save, replace(recipe, plan=plan), folder, 1, SMALL)
        return folder

    return save


def checkpoint_of(folder):
    return Checkpoint(max((folder / "checkpoints").glob("step_*")))


@pytest.mark.parametrize("plan", [pytest.param(plan, marks=[pytest.mark.long] * (plan in RARE)) for plan in PLANS])
def test_a_plan_reads_what_every_plan_wrote(recipe, saved, plan):
    """Most plans in bf16, where the fp32 weights are read as in fp32, and their narrow copies follow."""
    folders = [saved(p) for p in PLANS]
    target = replace(recipe, plan=plan, precision="fp32" if plan in FP32 else "bf16")
    assert pool().run(world_of(plan), load_each, target, folders) == [{}] * world_of(plan)


@pytest.mark.parametrize("plan", PLANS)
def test_every_element_is_written_once(saved, plan):
    folder = saved(plan)
    checkpoint, whole = checkpoint_of(folder), torch.load(folder / "whole.pt")
    counts = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in whole.items()}
    for file in checkpoint.files:
        for piece, _ in read_header(checkpoint.folder / file):
            assert piece.shape == tuple(whole[piece.name].shape)
            assert piece.name.endswith((".exp_avg", ".exp_avg_sq")) == file.startswith("optimizer")
            counts[piece.name][slices(piece.part)] += 1
    assert [name for name, count in counts.items() if not (count == 1).all()] == []
    assert len({tuple(whole[n].flatten()[:9].tolist()) for n in whole}) > 60  # moments are no zeros


SHARED = [  # rows of a piece of: a LayerNorm (of 32), the QKV weight (of 96), the positions (of 16)
    ("dp2_tp2", {32}, {24}, {4}),
    ("tp2_pp2", {32}, {48}, {8}),
    ("tp2", {32}, {48}, {8}),
    ("dp2_zero1", {16}, {48}, {8}),
]


@pytest.mark.parametrize("plan, norm, qkv, positions", SHARED)
def test_ranks_that_hold_the_same_share_the_writing_of_what_is_large(saved, plan, norm, qkv, positions):
    checkpoint, written, rows = checkpoint_of(saved(plan)), Counter(), {}
    for file in checkpoint.files:
        rank = int(file.split("-")[1])
        for piece, _ in read_header(checkpoint.folder / file):
            written[rank] += piece.num_bytes
            rows.setdefault(piece.name.rpartition(".exp_avg")[0] or piece.name, set()).add(piece.size[0])
    assert (rows["blocks.1.ln_1.weight"], rows["blocks.1.attn.qkv.weight"]) == (norm, qkv)
    assert rows["embedding.wpe.weight"] == positions
    stages = parse_plan(plan).pp
    share = world_of(plan) // stages
    for first in range(0, world_of(plan), share):
        ours = [written[rank] for rank in range(first, first + share)]
        assert max(ours) < 1.15 * min(ours), written

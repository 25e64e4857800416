"""Muon and NorMuon for experts: each matrix by itself, gate and up apart, as their definition in float64 says, under
every plan."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dtgpt.config.plan_choice import parse_plan
from dtgpt.optim.muon import MuonConfig
from dtgpt.optim.muon.normuon import EPS, NorMuonConfig
from dtgpt.train.setup import open_trainer
from tests.models.moe.test_plans import OLMOE
from tests.support.bodies_muon import drawn_gradient, moved_by_muon
from tests.support.ranks import pool

pytestmark = pytest.mark.slow(6)

STEPS = 3
SETTINGS = {"lr": 1e-2, "schedule": "constant", "warmup": 0, "weight_decay": 0.3}
KINDS = {"muon": MuonConfig(**SETTINGS), "normuon": NorMuonConfig(**SETTINGS)}


@pytest.fixture
def moe(recipe):
    """Experts of shapes that are wide (gate and up) and tall (down), none of them square."""
    return replace(recipe, model=OLMOE, micro_batch_size=2, global_batch_size=12, steps=STEPS)


def orthogonal(matrix: Tensor) -> Tensor:
    """The quintic's result (Jordan et al. 2024) of one matrix."""
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T if len(x) <= x.shape[1] else x.T @ x
        change = -4.775 * gram + 2.0315 * gram @ gram
        x = 3.4445 * x + (change @ x if len(x) <= x.shape[1] else x @ change)
    return x


def by_definition(matrix: Tensor, gradients: list[Tensor], kind: str) -> Tensor:
    """The weights of one matrix after steps with these gradients (Liu et al. 2025, section 2.2; Li et al. 2025)."""
    momentum, squares = torch.zeros_like(matrix), torch.zeros_like(matrix[:, 0])
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
        update = orthogonal(0.05 * gradient + 0.95 * momentum)
        if kind == "normuon":
            squares = 0.95 * squares + 0.05 * update.square().mean(1)
            divided = update / (squares.sqrt() + EPS)[:, None]
            update = divided * update.norm() / divided.norm()
        matrix = matrix * (1 - 1e-2 * 0.3) - 1e-2 * 0.2 * math.sqrt(max(matrix.shape)) * update
    return matrix


def matrices_of(name: str, stack: Tensor) -> list[Tensor]:
    """The matrices of a stack: down of each expert, or gate and up, whose rows alternate."""
    return [part for expert in stack for part in ((expert[0::2], expert[1::2]) if "gate_up" in name else (expert,))]


@pytest.mark.parametrize(
    ("kind", "plans"),
    [("muon", ["dp2", "dp2_zero2", "pp2_interleaved"]), ("normuon", ["dp2_zero1", "dp3_zero3", "dp2_pp2_zero1"])],
)
def test_each_matrix_of_each_expert_is_orthogonalised_alone(moe, kind, plans):
    """Three ranks cut the six experts, two of the plans nothing of them."""
    moe = replace(moe, optimizer=KINDS[kind])
    before, whole = moved_by_muon(moe, 0), moved_by_muon(moe, STEPS)
    stacks = [name for name, weight in whole.items() if weight.dim() == 3]
    assert len(stacks) == 2 * OLMOE.num_layers
    for name in stacks:
        regions = tuple(map(range, before[name].shape))
        gradients = [0.5 * drawn_gradient(name, step, regions).double() for step in range(STEPS)]
        given = zip(matrices_of(name, before[name].double()), *(matrices_of(name, g) for g in gradients), strict=True)
        expected = [by_definition(first, list(own), kind) for first, *own in given]
        for found, wanted in zip(matrices_of(name, whole[name]), expected, strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-6)
    for plan in plans:
        found = pool().run(parse_plan(plan).world, moved_by_muon, replace(moe, plan=plan), STEPS)[0]
        assert found.keys() == whole.keys()
        for name, weight in whole.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6, msg=f"{plan} {name}")


def test_routers_are_adamws(moe):
    with open_trainer(replace(moe, optimizer=KINDS["normuon"])) as trainer:
        names = {shard.name for shard in trainer.shards if "momentum" in trainer.optimizer.rule.state(shard.index)}
    assert "blocks.1.mlp.experts.down.weight" in names and not any("router" in name for name in names)

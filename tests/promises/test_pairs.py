"""Change the plan, keep the curve: one table of plans, models, optimizers and recomputation, dropout on.

Each pair of a model, or of an optimizer, and a kind of plan is in one case at least. A case begins under one plan,
saves, and goes on under another; losses, weights and memory are held against one process. `test_parity.py` has all
plans for GPT-2 and AdamW, in all precisions; `test_llama_parity.py` has documents.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.optim.muon import MuonConfig
from dtgpt.optim.muon.normuon import NorMuonConfig
from tests.support.bodies_optimizer import Part, train_part
from tests.support.families import OURS, SHAPE
from tests.support.mixed_blocks import MixedConfig
from tests.support.other_architecture import OtherConfig
from tests.support.other_optimizer import MomentumConfig
from tests.support.ranks import pool
from tests.support.windowed_blocks import WindowedConfig

pytestmark = pytest.mark.slow(28)

MODELS = OURS | {
    "gpt2": GPT2Config(**SHAPE, dropout=0.1),
    "llama": LlamaConfig(**SHAPE, num_kv_heads=2, head_dim=8, ffn_hidden_size=48, dropout=0.1),
    "other": OtherConfig(**SHAPE),
    "mixed": MixedConfig(**SHAPE | {"num_layers": 5}, dropout=0.1),
    "windowed": WindowedConfig(**SHAPE, dropout=0.1),
}
RATES = {"lr": 5e-3, "warmup": 2, "embedding_lr": 3e-3, "head_lr": 2e-3, "vector_lr": 1e-3}
OPTIMIZERS = {
    "adamw": OptimizerConfig(lr=3e-3, warmup=2, eps=1e-4),  # so that gradients of rounding alone make no whole steps
    "momentum": MomentumConfig(lr=0.3, warmup=2),
    "muon": MuonConfig(**RATES),
    "normuon": NorMuonConfig(**RATES),
}
HALF, STEPS = 1, 2
ROWS = 4 * 1000  # bytes of NorMuon's value for each row, of which no plan tells


class Case(NamedTuple):
    model: str
    optimizer: str
    first: str
    then: str
    recompute: str = "none"

    @property
    def kinds(self) -> set[str]:
        """What the two plans do to the model, the batch and the state."""
        found = set()
        for plan in map(parse_plan, (self.first, self.then)):
            found |= {"tp"} if plan.tp > 1 and not plan.sequence_parallel else set()
            found |= {"sp"} if plan.sequence_parallel else set()
            found |= {f"zero{plan.zero}"} if plan.zero else set()
            found |= {plan.schedule} if plan.pp > 1 else set()
            found |= {"cp"} if plan.cp > 1 else set()
        return found


CASES = [
    Case("gpt2", "momentum", "tp2_pp2", "dp2_zero2"),
    Case("gpt2", "muon", "pp2_interleaved", "dp3_zero2"),
    Case("gpt2", "normuon", "dp2_tp2_zero1", "pp2_zbv"),
    Case("llama", "muon", "dp2_tp2_sp_zero1", "pp2_zbv"),
    Case("other", "momentum", "tp2_sp_pp2_zbv", "dp2_zero3"),
    Case("mixed", "adamw", "dp2_tp2_zero2", "pp2_zbv"),
    Case("mixed", "momentum", "tp2_sp_pp2", "dp2_zero3", recompute="full"),
    Case("windowed", "adamw", "cp2_tp2", "pp2_zbv"),
    Case("windowed", "momentum", "tp2_sp_pp2_interleaved", "dp2_zero1", recompute="selective"),
    Case("gpt_neo", "adamw", "tp2_sp_pp2_zbv", "cp2_zero3"),
    Case("olmo3", "adamw", "tp2_pp2_zbv", "cp2_tp2_sp_zero1"),
    Case("gemma3", "adamw", "tp2_pp2_zbv", "cp2_tp2_sp"),
    Case("gpt_oss", "adamw", "tp2_sp_pp2_zbv", "cp2_zero3"),
    Case("qwen2", "adamw", "tp2_sp_pp2_zbv", "cp2"),
]


def test_each_pair_is_in_a_case():
    met = {(value, kind) for case in CASES for value in (case.model, case.optimizer) for kind in case.kinds}
    zbv, interleaved, plain = (parse_plan(f"pp2_{name}").schedule for name in ("zbv", "interleaved", "1f1b"))
    kinds = {"tp", "sp", "zero1", "zero2", "zero3", zbv, interleaved, plain}
    assert not set(product(["momentum"], kinds)) - met
    assert not set(product(MODELS, [zbv])) - met
    assert not set(product(["adamw", "muon", "normuon"], ["zero1", zbv])) - met
    assert not set(product(OURS, ["sp", "cp"])) - met
    assert all(met & {(model, "tp"), (model, "sp")} for model in MODELS)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Return what gives the curve and the weights of one process, each made once."""
    made: dict[tuple, Part] = {}

    def of(recipe: Recipe, last: int) -> Part:
        key = recipe.model, recipe.optimizer, recipe.global_batch_size, recipe.precision
        if key not in made:
            made[key] = train_part(replace(recipe, plan="single"), tmp_path_factory.mktemp("one"), last)
        return made[key]

    return of


def run(recipe: Recipe, plan: str, folder: Path, last: int) -> list[Part]:
    """Of a batch that the plan cuts into two micro-batches."""
    made = parse_plan(plan)
    size = recipe.global_batch_size // (2 * (made.dp or 1))
    return pool().run(made.world, train_part, replace(recipe, plan=plan, micro_batch_size=size), folder, last)


def of(recipe: Recipe, model: str, optimizer: str = "adamw", **changes) -> Recipe:
    chosen = {"model": MODELS[model], "optimizer": OPTIMIZERS[optimizer]}
    return replace(recipe, **chosen, steps=STEPS, micro_batch_size=2, **changes)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_run_under_two_plans_follows_one_process(recipe, references, tmp_path, case):
    replicas = max(parse_plan(plan).dp or 1 for plan in (case.first, case.then))
    recipe = of(recipe, case.model, case.optimizer, global_batch_size=4 * replicas)
    expected, found = references(recipe, STEPS), []
    recipe = replace(recipe, recompute=case.recompute)
    for plan, last in ((case.first, HALF), (case.then, STEPS)):
        ranks = run(recipe, plan, tmp_path, last)
        found += ranks[0].losses
        for part in ranks:
            (sizes, state), (planned_sizes, planned_state) = part.held, part.planned
            assert sizes == planned_sizes
            assert planned_state <= state <= planned_state + ROWS * (case.optimizer == "normuon")
        assert sum(part.held[1] for part in ranks)
    is_muon = "muon" in case.optimizer
    assert found == pytest.approx(expected.losses, rel=1e-5 if is_muon else 1e-6)
    assert ranks[0].weights.keys() == expected.weights.keys()
    for name, whole in ranks[0].weights.items():
        torch.testing.assert_close(whole, expected.weights[name], rtol=1e-4, atol=3e-5 if is_muon else 1e-5)


@pytest.mark.parametrize("model", ["mixed", "gemma3", "gpt_oss", "qwen2"])
def test_fp8_under_tensor_parallelism_is_that_of_one_process(recipe, references, tmp_path, model):
    """Activations that no fused kernel knows are those of the model, also between two products in fp8."""
    recipe = of(recipe, model, precision="fp8", global_batch_size=4)
    recipe = replace(recipe, model=replace(MODELS[model], dropout=0.0))
    found = run(recipe, "tp2_sp", tmp_path, STEPS)[0].losses
    assert found == pytest.approx(references(recipe, STEPS).losses, rel=1e-3)

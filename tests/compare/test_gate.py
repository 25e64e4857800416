"""The first tensor that differs is found, and a fault is told from rounding."""

from dataclasses import replace

import pytest
import torch

from dtgpt.compare.finding import Located
from tests.support.interpreter import first_kernels_of

pytestmark = pytest.mark.slow(8)

BLOCK, LAST = "trainer.stages[0].blocks['0']", "trainer.stages[0].blocks['1']"


@pytest.fixture
def recipe(tiny):
    return replace(tiny, micro_batch_size=2)


@pytest.fixture
def located(recipe, traced):
    return traced(recipe).located


def test_the_same_run_has_the_same_bits(recipe, located):
    assert located(recipe) == Located()


@pytest.mark.parametrize("plan", ["dp2_zero3", "tp2_sp_pp2"])
def test_a_plan_is_apart_by_rounding(recipe, located, plan):
    found = located(recipe, plan)
    assert found.fault is None and found.first is not None and found.first.verdict in ("bits", "rounding")
    assert found.first.difference < 1e-6 and found.first.error < 2 * found.first.reference_error


FAULTS = {
    "epsilon": (f"{BLOCK}.ln_1.eps = 1e-4", "blocks.0.ln_1", "activation"),
    "key": (f"{BLOCK}.drop_2.index = 1", "blocks.0", "activation"),
    "backward": (
        f"{LAST}.mlp.fc.register_full_backward_hook(lambda m, inputs, outputs: (2 * inputs[0],))",
        "blocks.1.mlp.fc", "gradient of activation",
    ),
    "parameter": (
        f"{LAST}.attn.proj.weight.register_hook(lambda gradient: 1.00001 * gradient)", "blocks.1.attn.proj", "gradient",
    ),
    "clipping": ("trainer.optimizer.clip = 0.5", "blocks.0.attn.proj", "state"),
    "rate": ("trainer.optimizer.schedule *= 1.001", "blocks.0.attn.proj", "weight"),
    "norm": ("trainer.shards._shares *= 1.001", "(all)", "gradient norm"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_located(recipe, located, name):
    change, module, kind = FAULTS[name]
    found = located(recipe, change=change)
    assert (found.fault.module, found.fault.kind, found.fault.step) == (module, kind, 1)


@pytest.mark.parametrize(
    "change, module",
    [("", None), (f"{BLOCK}.ln_1.eps = 1.0", "blocks.0.ln_1"), FAULTS["backward"][:2]],
    ids=["none", "epsilon", "backward"],
)
def test_a_fault_is_told_from_what_another_precision_rounds(recipe, located, change, module):
    found = located(replace(recipe, precision="bf16"), change=change, limit=0.03)
    assert found.first is not None and (found.fault.module if found.fault else None) == module


def test_a_fault_of_one_rank_is_located_on_that_rank(recipe, located):
    change = "if trainer.mesh.rank == 1: trainer.stages[0].blocks['1'].ln_2.eps = 1e-3"
    found = located(recipe, "dp2", change)
    assert (found.fault.module, found.fault.rank, found.fault.micro_batch) == ("blocks.1.ln_2", 1, 2)
    assert found.fault.error > 100 * found.fault.reference_error


def test_a_part_of_a_gradient_is_told_from_a_fault(recipe, traced, monkeypatch):
    """A fused norm on a GPU gives its sum the gradient of later operations alone, plain ones the whole, as float64, of
    which there is one sample."""
    monkeypatch.setattr("dtgpt.compare.float64.OPERATIONS", 0.0)
    fused = ("norm_and_pass", "residual_norm", "residual")
    with first_kernels_of(*fused, where=lambda x: x.dtype != torch.float64):
        one = traced(replace(recipe, name="fused"))
    assert one.located(recipe).fault is None
    change, module, _ = FAULTS["backward"]
    assert one.located(recipe, change=change).fault.module == module
    monkeypatch.setattr("dtgpt.compare.gate.SAME", 0.0)
    unknown = one.located(recipe).fault
    assert (unknown.tensor, unknown.micro_batch, unknown.error) == ("blocks.1.ln_2 output 0", 1, None)

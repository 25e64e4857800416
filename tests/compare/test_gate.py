"""The first tensor that differs is found, and a fault is told from rounding."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtgpt.compare.compare import fitting_plan
from dtgpt.compare.finding import Located
from dtgpt.compare.gate import Reference, locate
from dtgpt.compare.record import Tracing
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.gpt2 import GPT2Config
from tests.support.interpreter import first_kernels_of
from tests.support.ranks import pool
from tests.support.runs import traced_record

pytestmark = pytest.mark.slow(13)

MODEL = GPT2Config(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=257, dropout=0.1)
BLOCK, LAST = "trainer.stages[0].blocks['0']", "trainer.stages[0].blocks['1']"


@pytest.fixture
def recipe(recipe):
    return replace(recipe, model=MODEL, micro_batch_size=2, global_batch_size=8, optimizer=OptimizerConfig(lr=3e-3))


@pytest.fixture
def reference(recipe, tmp_path) -> Reference:
    file = tmp_path / "one"
    return Reference(file, traced_record(recipe, Tracing(file, tmp_path / "shared", is_reference=True)))


def located(
    recipe, reference: Reference, folder: Path, plan: str = "single", change: str = "", limit: float = 1e-5
) -> Located:
    """Return where a plan parts from the reference. change: as of `traced_record`; limit: as of `locate`."""
    tracing = Tracing(folder / "other", folder / "shared", is_reference=False)
    record, *_ = pool().run(
        fitting_plan(plan, [], {}).world, traced_record, replace(recipe, plan=plan), tracing, change
    )
    return locate(reference, record, tracing.file, limit)


def test_the_same_run_has_the_same_bits(recipe, reference, tmp_path):
    assert located(recipe, reference, tmp_path) == Located()


@pytest.mark.parametrize("plan", ["dp2_zero3", "tp2_sp_pp2"])
def test_a_plan_is_apart_by_rounding(recipe, reference, tmp_path, plan):
    found = located(recipe, reference, tmp_path, plan)
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
def test_a_fault_is_located(recipe, reference, tmp_path, name):
    change, module, kind = FAULTS[name]
    found = located(recipe, reference, tmp_path, change=change)
    assert (found.fault.module, found.fault.kind, found.fault.step) == (module, kind, 1)


@pytest.mark.parametrize(
    "change, module",
    [("", None), (f"{BLOCK}.ln_1.eps = 1.0", "blocks.0.ln_1"), FAULTS["backward"][:2]],
    ids=["none", "epsilon", "backward"],
)
def test_a_fault_is_told_from_what_another_precision_rounds(recipe, reference, tmp_path, change, module):
    found = located(replace(recipe, precision="bf16"), reference, tmp_path, change=change, limit=0.03)
    assert found.first is not None and (found.fault.module if found.fault else None) == module


def test_a_fault_of_one_rank_is_located_on_that_rank(recipe, reference, tmp_path):
    change = "if trainer.mesh.rank == 1: trainer.stages[0].blocks['1'].ln_2.eps = 1e-3"
    found = located(recipe, reference, tmp_path, "dp2", change)
    assert (found.fault.module, found.fault.rank, found.fault.micro_batch) == ("blocks.1.ln_2", 1, 2)
    assert found.fault.error > 100 * found.fault.reference_error


def test_a_part_of_a_gradient_is_told_from_a_fault(recipe, tmp_path, monkeypatch):
    """A fused norm on a GPU gives its sum the gradient of later operations alone, plain ones the whole, as float64, of
    which there is one sample."""
    monkeypatch.setattr("dtgpt.compare.float64.OPERATIONS", 0.0)
    tracing = Tracing(tmp_path / "one", tmp_path / "shared", is_reference=True)
    fused = ("norm_and_pass", "residual_norm", "residual")
    with first_kernels_of(*fused, where=lambda x: x.dtype != torch.float64):
        reference = Reference(tracing.file, traced_record(recipe, tracing))
    assert located(recipe, reference, tmp_path).fault is None
    change, module, _ = FAULTS["backward"]
    assert located(recipe, reference, tmp_path, change=change).fault.module == module
    monkeypatch.setattr("dtgpt.compare.gate.SAME", 0.0)
    unknown = located(recipe, reference, tmp_path).fault
    assert (unknown.tensor, unknown.micro_batch, unknown.error) == ("blocks.1.ln_2 output 0", 1, None)

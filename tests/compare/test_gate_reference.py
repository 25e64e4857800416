"""What the gate holds runs against: the same samples of a reference that repeats itself, and its state over steps."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from dtgpt.compare.gate import Reference, locate, problem_of_reference, problem_of_tokens
from dtgpt.compare.record import Tracing, read_record, save_record
from dtgpt.compare.verdict import difference, first_state, limits_between, problems
from dtgpt.models import gpt2
from dtgpt.models.decoder import Decoder, unique_parameters
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.optim.muon import MuonConfig
from dtgpt.optim.muon.normuon import NorMuonConfig
from tests.support.runs import traced_record

pytestmark = pytest.mark.slow(12)

SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 16, "vocab_size": 257}
BLOCK = "trainer.stages[0].blocks['0']"


@pytest.fixture
def recipe(tiny):
    return tiny


DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
SAME_SAMPLES = {
    "half": ("single", {"micro_batch_size": 2}, {}), "one": ("single", {"micro_batch_size": 1}, {}),
    "whole": ("single", {"micro_batch_size": 8}, {}), "replicas": ("dp2", {"micro_batch_size": 1}, {}),
    "stages": ("pp2", {"micro_batch_size": 2}, {}), "slices": ("cp2", {"micro_batch_size": 8}, {}),
    "documents": ("cp2", {"micro_batch_size": 2}, {"data": DOCUMENTS}),
    "ramp": ("dp2", {"micro_batch_size": 2}, {"rampup_batch_size": "4 4 8"}),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_SAMPLES)
def test_other_micro_batches_of_the_same_samples_differ_by_rounding(recipe, traced, name):
    plan, own, both = SAME_SAMPLES[name]
    if "data" in both:
        both = {"data": replace(recipe.data, **both["data"])}
    recipe = replace(recipe, **both)
    one = traced(recipe)
    assert problem_of_reference(one.reference, None) is None
    file, ours = one.run(replace(recipe, **own), plan)
    found = locate(one.reference, ours, file, 1e-5)
    assert found.fault is None and problem_of_tokens(ours, one.record, found) == ""
    assert problems(difference(ours, one.record), limits_between(ours, one.record)) == []


def test_a_fault_is_located_in_the_micro_batch_of_its_sample(recipe, traced):
    small = replace(recipe, micro_batch_size=1)
    at_fourth = (
        "lambda m, x, out: out * (2 if m.__dict__.setdefault('calls', [0]).append(0) or len(m.calls) == 5 else 1)"
    )
    found = traced(recipe).located(small, change=f"{BLOCK}.mlp.fc.register_forward_hook({at_fourth})").fault
    assert (found.module, found.kind, found.micro_batch) == ("blocks.0.mlp.fc", "activation", 3)


def test_other_tokens_are_told_before_anything_else(recipe, traced):
    one = traced(recipe, 2)

    def told(recipe, change=""):
        file, ours = one.run(recipe, change=change)
        found = locate(one.reference, ours, file, 1e-5)
        return found.fault, problem_of_tokens(ours, one.record, found)

    shift = "begin = trainer.samples_before; trainer.samples_before = lambda step: begin(step) + "
    fault, problem = told(replace(recipe, micro_batch_size=2), f"{shift} 1")
    assert (fault.kind, fault.module, fault.sample) == ("tokens", "embedding", 0)
    assert problem.startswith("other tokens than one process has in embedding: tokens")
    fault, problem = told(recipe, f"{shift} step")
    assert fault is None
    assert problem.startswith("other tokens than one process has: 2 samples of step 2, such as 8;")
    assert "16 samples in place of 8" in told(replace(recipe, global_batch_size=16))[1]


def config_with(changed) -> type[GPT2Config]:
    """Return a configuration whose head reads `changed(head, x)` in place of x, and has a module that may be called."""

    class Head(gpt2.Head):
        def __init__(self, config):
            super().__init__(config)
            self.extra, self.calls = torch.nn.Tanh(), 0

        def compute(self, x, *rest):
            self.calls += 1
            return super().compute(changed(self, x), *rest)

    @dataclass(frozen=True, kw_only=True)
    class Config(GPT2Config):
        def make_head(self):
            return Head(self)

    return Config


def with_fixed_mask(head, x):
    if x.dtype == torch.float32:
        torch.manual_seed(0)
    return F.dropout(x, 0.1, training=True)


UNREPEATED = "one process does not repeat itself"
WRONG = {
    "own mask": (lambda head, x: F.dropout(x, 0.1, training=True), "head", UNREPEATED),
    "noise": (lambda head, x: x + 1e-7 * torch.randn_like(x), "head", UNREPEATED),
    "late module": (lambda head, x: head.extra(x) if head.calls > 2 else x, "head.extra", UNREPEATED),
    "fixed mask": (with_fixed_mask, "head", "one process is further from float64 than fp32 explains"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_reference_that_cannot_be_one_is_the_verdict(recipe, tmp_path, name):
    changed, module, words = WRONG[name]
    file = tmp_path / "one"
    own = replace(recipe, model=config_with(changed)(dropout=0.1, **SIZES))
    record = traced_record(own, Tracing(file, tmp_path / "shared", is_reference=True))
    save_record(record, file)
    found, sentence = problem_of_reference(Reference(file, read_record(file)), None)
    assert found.module == module and sentence.startswith(words) and "in" in sentence


@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", "normuon"), ("bf16", "adamw"), ("fp8", "adamw")])
def test_one_process_repeats_itself_and_is_near_to_float64(recipe, traced, precision, optimizer):
    if optimizer == "normuon":
        recipe = replace(recipe, optimizer=NorMuonConfig(lr=3e-3))
    record = traced(replace(recipe, precision=precision)).record
    assert record.unrepeated is None and record.far is None


AFTER = "rule = trainer.optimizer.rule; step = rule.step\n"
FORGETS = (
    AFTER
    + """
def forgets(*given):
    step(*given)
    if trainer.mesh.rank == 1:
        rule.state(NUMBER)["momentum"].zero_()
rule.step = forgets
"""
)
HALVES = (
    AFTER
    + """
def halves(*given):
    step(*given)
    if trainer.mesh.world == 2 and trainer.step >= 2:
        for shard in trainer.shards:
            rule.state(shard.index)["exp_avg_sq"].mul_(0.5)
rule.step = halves
"""
)


def test_a_second_moment_that_is_halved_after_the_first_step_is_found(recipe, traced):
    one = traced(recipe, 4)
    file, ours = one.run(recipe, "dp2", HALVES)
    assert locate(one.reference, ours, file, 1e-5).fault is None
    found = first_state(difference(ours, one.record), limits_between(ours, one.record), ())
    assert (found.kind, found.step) == ("state", 3) and found.tensor.startswith("exp_avg_sq of ")
    assert found.difference > 0.3
    _, right = one.run(recipe, "dp2")
    assert first_state(difference(right, one.record), limits_between(ours, one.record), ()) is None


@pytest.mark.parametrize(("config", "steps"), [(MuonConfig, 1), (NorMuonConfig, 3)])
def test_a_momentum_that_one_rank_forgets_is_found_there(recipe, traced, config, steps):
    recipe = replace(recipe, optimizer=config(lr=3e-3))
    one = traced(recipe, steps)
    names = list(unique_parameters(Decoder(recipe.model, torch.float32)))
    number = next(i for i, name in enumerate(names) if name == "blocks.1.mlp.fc.weight")
    _, ours = one.run(recipe, "dp2", FORGETS.replace("NUMBER", str(number)))
    found = first_state(difference(ours, one.record), limits_between(ours, one.record), ())
    assert (found.module, found.kind, found.rank) == ("blocks.1.mlp.fc", "state", 1)
    assert found.tensor == "momentum of blocks.1.mlp.fc.weight" and found.step == max(1, steps - 1)
    _, right = one.run(recipe, "dp2")
    assert first_state(difference(right, one.record), limits_between(right, one.record), ()) is None
    kinds = {apart.kind for apart in right.apart}
    assert kinds == {"weight", "momentum", "exp_avg", "exp_avg_sq", *(["row_square"] * (config is NorMuonConfig))}


def test_a_validation_loss_of_its_own_is_found(recipe, traced):
    one = traced(recipe)
    off = "mean = trainer.engine.evaluate; trainer.engine.evaluate = lambda batch: 1.001 * mean(batch)"
    for change, wanted in (("", []), (off, ["the validation loss differs by 1.0e-03"])):
        _, ours = one.run(recipe, "dp2", change)
        assert problems(difference(ours, one.record), limits_between(ours, one.record)) == wanted


def test_matrices_that_muon_orthogonalises_in_16_bits_differ_by_rounding(recipe, traced):
    recipe = replace(recipe, optimizer=MuonConfig(lr=3e-3), precision="bf16", micro_batch_size=2)
    one = traced(recipe)
    file, ours = one.run(recipe, "pp2")
    assert locate(one.reference, ours, file, limits_between(ours, one.record).first_gradient).fault is None

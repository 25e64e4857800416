"""What the gate holds runs against: the same samples of a reference that repeats itself, and its state over steps."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from dtgpt.compare.compare import fitting_plan
from dtgpt.compare.gate import Reference, locate, problem_of_reference, problem_of_tokens
from dtgpt.compare.record import Tracing, read_record, save_record
from dtgpt.compare.verdict import difference, first_state, limits_between, problems
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models import gpt2
from dtgpt.models.decoder import Decoder, unique_parameters
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.optim.muon import MuonConfig
from dtgpt.optim.muon.normuon import NorMuonConfig
from tests.support.ranks import pool
from tests.support.runs import traced_record

pytestmark = pytest.mark.slow(30)

SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 16, "vocab_size": 257}
MODEL = GPT2Config(dropout=0.1, **SIZES)
BLOCK = "trainer.stages[0].blocks['0']"


@pytest.fixture
def recipe(recipe):
    return replace(recipe, model=MODEL, micro_batch_size=4, global_batch_size=8, optimizer=OptimizerConfig(lr=3e-3))


@pytest.fixture
def run(tmp_path):
    """Return what records some steps of a recipe: of the reference first."""

    def record(recipe, plan="single", change="", steps=1, is_reference=False):
        file = tmp_path / ("one" if is_reference else "other")
        tracing = Tracing(file, tmp_path / "shared", is_reference)
        given = replace(recipe, plan=plan), tracing, change, steps
        found, *_ = pool().run(fitting_plan(plan, [], {}).world, traced_record, *given)
        return (Reference(file, found), found) if is_reference else (file, found)

    return record


DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
SAME_SAMPLES = {
    "half": ("single", {"micro_batch_size": 2}, {}),
    "one": ("single", {"micro_batch_size": 1}, {}),
    "whole": ("single", {"micro_batch_size": 8}, {}),
    "replicas": ("dp2", {"micro_batch_size": 1}, {}),
    "stages": ("pp2", {"micro_batch_size": 2}, {}),
    "slices": ("cp2", {"micro_batch_size": 8}, {}),
    "documents": ("cp2", {"micro_batch_size": 2}, {"data": DOCUMENTS}),
    "ramp": ("dp2", {"micro_batch_size": 2}, {"rampup_batch_size": "4 4 8"}),
}


@pytest.mark.parametrize("name", SAME_SAMPLES)
def test_other_micro_batches_of_the_same_samples_differ_by_rounding(recipe, run, name):
    plan, own, both = SAME_SAMPLES[name]
    if "data" in both:
        both = {"data": replace(recipe.data, **both["data"])}
    recipe = replace(recipe, **both)
    reference, theirs = run(recipe, is_reference=True)
    assert problem_of_reference(reference, None) is None
    file, ours = run(replace(recipe, **own), plan)
    found = locate(reference, ours, file, 1e-5)
    assert found.fault is None and problem_of_tokens(ours, theirs, found) == ""
    assert problems(difference(ours, theirs), limits_between(ours, theirs)) == []


def test_a_fault_is_located_in_the_micro_batch_of_its_sample(recipe, run):
    reference, _ = run(recipe, is_reference=True)
    small = replace(recipe, micro_batch_size=1)
    at_fourth = (
        "lambda m, x, out: out * (2 if m.__dict__.setdefault('calls', [0]).append(0) or len(m.calls) == 5 else 1)"
    )
    file, ours = run(small, change=f"{BLOCK}.mlp.fc.register_forward_hook({at_fourth})")
    found = locate(reference, ours, file, 1e-5).fault
    assert (found.module, found.kind, found.micro_batch) == ("blocks.0.mlp.fc", "activation", 3)


def test_other_tokens_are_told_before_anything_else(recipe, run):
    reference, theirs = run(recipe, steps=2, is_reference=True)
    shift = "begin = trainer.samples_before; trainer.samples_before = lambda step: begin(step) + "
    file, ours = run(replace(recipe, micro_batch_size=2), change=f"{shift} 1", steps=2)
    found = locate(reference, ours, file, 1e-5)
    assert (found.fault.kind, found.fault.module, found.fault.sample) == ("tokens", "embedding", 0)
    assert problem_of_tokens(ours, theirs, found).startswith("other tokens than one process has in embedding: tokens")
    file, ours = run(recipe, change=f"{shift} step", steps=2)
    found = locate(reference, ours, file, 1e-5)
    assert found.fault is None
    words = "other tokens than one process has: 2 samples of step 2, such as 8;"
    assert problem_of_tokens(ours, theirs, found).startswith(words)
    file, ours = run(replace(recipe, global_batch_size=16), steps=2)
    found = locate(reference, ours, file, 1e-5)
    assert "16 samples in place of 8" in problem_of_tokens(ours, theirs, found)


class OwnHead(gpt2.Head):
    def compute(self, x, *rest):
        return super().compute(self.changed(x), *rest)

    def changed(self, x):
        return F.dropout(x, 0.1, training=True)


class NoisyHead(OwnHead):
    def changed(self, x):
        return x + 1e-7 * torch.randn_like(x)


class FixedHead(OwnHead):
    def changed(self, x):
        if x.dtype == torch.float32:
            torch.manual_seed(0)
        return F.dropout(x, 0.1, training=True)


class LateHead(OwnHead):
    """Has a module that the first step does not call."""

    def __init__(self, config):
        super().__init__(config)
        self.extra, self.calls = torch.nn.Tanh(), 0

    def changed(self, x):
        self.calls += 1
        return self.extra(x) if self.calls > 2 else x


@dataclass(frozen=True, kw_only=True)
class OwnConfig(GPT2Config):
    head = OwnHead

    def make_head(self):
        return self.head(self)


@dataclass(frozen=True, kw_only=True)
class NoisyConfig(OwnConfig):
    head = NoisyHead


@dataclass(frozen=True, kw_only=True)
class FixedConfig(OwnConfig):
    head = FixedHead


@dataclass(frozen=True, kw_only=True)
class LateConfig(OwnConfig):
    head = LateHead


@pytest.mark.parametrize(
    ("config", "module", "words"),
    [
        (OwnConfig, "head", "one process does not repeat itself"),
        (NoisyConfig, "head", "one process does not repeat itself"),
        (LateConfig, "head.extra", "one process does not repeat itself"),
        (FixedConfig, "head", "one process is further from float64 than fp32 explains"),
    ],
)  # fmt: skip
def test_a_reference_that_cannot_be_one_is_the_verdict(recipe, tmp_path, config, module, words):
    file = tmp_path / "one"
    own = replace(recipe, model=config(dropout=0.1, **SIZES))
    record = traced_record(own, Tracing(file, tmp_path / "shared", is_reference=True))
    save_record(record, file)
    found, sentence = problem_of_reference(Reference(file, read_record(file)), None)
    assert found.module == module and sentence.startswith(words) and "in" in sentence


@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", "normuon"), ("bf16", "adamw"), ("fp8", "adamw")])
def test_one_process_repeats_itself_and_is_near_to_float64(recipe, tmp_path, precision, optimizer):
    file = tmp_path / "one"
    if optimizer == "normuon":
        recipe = replace(recipe, optimizer=NorMuonConfig(lr=3e-3))
    tracing = Tracing(file, tmp_path / "shared", is_reference=True)
    record = traced_record(replace(recipe, precision=precision), tracing)
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


def test_a_second_moment_that_is_halved_after_the_first_step_is_found(recipe, run):
    reference, theirs = run(recipe, steps=5, is_reference=True)
    file, ours = run(recipe, "dp2", HALVES, steps=5)
    assert locate(reference, ours, file, 1e-5).fault is None
    found = first_state(difference(ours, theirs), limits_between(ours, theirs), ())
    assert (found.kind, found.step) == ("state", 4) and found.tensor.startswith("exp_avg_sq of ")
    assert found.difference > 0.3
    found = first_state(difference(run(recipe, "dp2", steps=5)[1], theirs), limits_between(ours, theirs), ())
    assert found is None


@pytest.mark.parametrize(("config", "steps"), [(MuonConfig, 1), (NorMuonConfig, 3)])
def test_a_momentum_that_one_rank_forgets_is_found_there(recipe, run, config, steps):
    recipe = replace(recipe, optimizer=config(lr=3e-3))
    _, theirs = run(recipe, steps=steps, is_reference=True)
    names = list(unique_parameters(Decoder(recipe.model, torch.float32)))
    number = next(i for i, name in enumerate(names) if name == "blocks.1.mlp.fc.weight")
    _, ours = run(recipe, "dp2", FORGETS.replace("NUMBER", str(number)), steps=steps)
    found = first_state(difference(ours, theirs), limits_between(ours, theirs), ())
    assert (found.module, found.kind, found.rank) == ("blocks.1.mlp.fc", "state", 1)
    assert found.tensor == "momentum of blocks.1.mlp.fc.weight" and found.step == max(1, steps - 1)
    _, right = run(recipe, "dp2", steps=steps)
    assert first_state(difference(right, theirs), limits_between(right, theirs), ()) is None
    kinds = {apart.kind for apart in right.apart}
    assert kinds == {"weight", "momentum", "exp_avg", "exp_avg_sq", *(["row_square"] * (config is NorMuonConfig))}


def test_a_validation_loss_of_its_own_is_found(recipe, run):
    _, theirs = run(recipe, is_reference=True)
    off = "mean = trainer.engine.mean_loss; trainer.engine.mean_loss = lambda batch: 1.001 * mean(batch)"
    for change, wanted in (("", []), (off, ["the validation loss differs by 1.0e-03"])):
        _, ours = run(recipe, "dp2", change)
        assert problems(difference(ours, theirs), limits_between(ours, theirs)) == wanted


def test_matrices_that_muon_orthogonalises_in_16_bits_differ_by_rounding(recipe, run):
    recipe = replace(recipe, optimizer=MuonConfig(lr=3e-3), precision="bf16", micro_batch_size=2)
    reference, theirs = run(recipe, is_reference=True)
    file, ours = run(recipe, "pp2")
    assert locate(reference, ours, file, limits_between(ours, theirs).first_gradient).fault is None

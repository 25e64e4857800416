"""Runs of mixtures of experts: corrections in checkpoints, figures in records, the picture, padding, and what is
refused."""

import json
from dataclasses import replace

import pytest
import torch

from dtgpt.config.overrides import explain_for, read_words, take
from dtgpt.config.recipe import Recipe
from dtgpt.interop.hf.olmoe import Olmoe
from dtgpt.models.batch import Batch
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.moe.mixture import routers
from dtgpt.optim.balance.config import BalanceConfig
from dtgpt.optim.balance.picture import NAME, draw, layers_of
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from dtgpt.util.errors import UserError
from tests.optim.balance.test_balance import ALL, OLMOE
from tests.support.bodies_balance import balance_of
from tests.support.bodies_grpo import Low
from tests.support.bodies_optimizer import train_part
from tests.support.ranks import pool
from tests.support.runs import change, newest_run, training

pytestmark = pytest.mark.slow(8)


@pytest.fixture
def moe(recipe) -> Recipe:
    return replace(recipe, model=OLMOE, steps=4, micro_batch_size=2, global_batch_size=8, balance=ALL)


@pytest.mark.parametrize(
    ("first", "then", "precision"), [("dp2_zero3", "pp2_1f1b", "fp32"), ("pp2_zbv", "dp2_zero1", "bf16")]
)
def test_corrections_go_on_under_another_plan(moe, tmp_path, first, then, precision):
    """From a checkpoint, also in 16 bits, where steps of a correction are smaller than the type of the weights."""
    moe = replace(moe, balance=replace(ALL, bias_step=0.001), precision=precision)
    whole = train_part(replace(moe, plan="single"), tmp_path / "whole", 4).weights
    for plan, last in ((first, 2), (then, 4)):
        parts = pool().run(2, train_part, replace(moe, plan=plan), tmp_path / "halves", last)[0].weights
    names = [name for name in whole if "correction" in name]
    for name in names:
        assert (whole[name] * 1000 - (whole[name] * 1000).round()).abs().max() < 1e-3  # whole steps: in fp32
        assert parts[name].any() and (precision == "bf16" or torch.equal(parts[name], whole[name]))
    assert len(names) == 4


def test_a_run_records_loads_of_each_layer_and_draws_them(moe):
    recipe = change(moe, log={"interval": 2, "eval_interval": 0, "sample_tokens": 0})
    train(recipe)
    run = newest_run(recipe)
    last = [record for record in read_records(run / "metrics.jsonl") if "load_max" in record][-1]
    for name, whole in (("load_max", max), ("load_min", min), ("dead_experts", sum)):
        assert last[name] == whole(last[f"{name}_{layer}"] for layer in range(4))
    assert last["router_entropy"] == pytest.approx(sum(last[f"router_entropy_{n}"] for n in range(4)) / 4, rel=1e-6)
    assert 0 <= last["load_min"] <= 1 <= last["load_max"] <= 3 and 0 < last["router_entropy"] < 1.8
    assert last["balance_loss"] >= 1.9 and last["z_loss"] > 0 and last["loss"] < 7  # the loss is that of tokens alone


def test_the_picture_has_a_curve_of_each_layer(tmp_path):
    records = [
        {"step": step, **{f"{name}_{n}": step * n for name in figures for n in range(3)}}
        for figures in (("load_max", "load_min", "router_entropy", "dead_experts"),)
        for step in (1, 2)
    ]
    assert layers_of(records) == [0, 1, 2] and layers_of([{"step": 1, "loss": 2.0}]) == []
    draw([*records, {"step": 2, "validation_loss": 2.0}], tmp_path / NAME)
    assert (tmp_path / NAME).read_bytes()[:4] == b"\x89PNG"


def test_padding_counts_in_no_load_and_no_loss(moe):
    """Whatever tokens it has: of two batches that differ in padding alone."""
    figures = []
    for filler in (3, 9):
        trainer = training(replace(moe, micro_batch_size=8))
        tokens = torch.randint(257, (8, 16), generator=torch.Generator().manual_seed(0))
        tokens[:, 10:] = torch.randint(257, (8, 6), generator=torch.Generator().manual_seed(filler))
        bounds = torch.tensor([[0, 10]] * 10 + [[10, 16]] * 6, dtype=torch.int32).expand(8, 16, 2)
        weights = (torch.arange(16) < 10).float().expand(8, 16) * 1.6
        batch = Batch(tokens, targets=tokens, document_bounds=bounds, loss_weights=weights)
        balance_of(trainer).before(trainer.engine, batch, 2)
        loss = trainer.engine.gradients(2, batch)
        figures.append([trainer.mean_loss(trainer.update(loss)), balance_of(trainer).metrics()])
        assert balance_of(trainer).last[:, :6].sum(1).tolist() == [8 * 10 * 2] * 4
    assert figures[0] == figures[1]


REFUSED = {
    "over": (["--balance.over", "micro_batch"], "balance.over='micro_batch' is not what .* use batch or sequence"),
    "layers": (["--balance.layers", "some"], "use together or apart"),
    "step": (["--balance.bias_step", "2"], "balance.bias_step"),
    "negative": (["--balance.loss", "-1"], "balance.loss"),
    "capacity": (["--balance.capacity_factor", "1.25"], "never drops a token .* leave --balance.capacity_factor out"),
    "Megatron's": (["--moe-expert-capacity-factor", "1.25"], "leave --moe-expert-capacity-factor out"),
    "jitter": (["--model.router_jitter_noise", "0.1"], "no noise to routers.* leave --model.router_jitter_noise out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_by_which_the_loss_would_depend_on_the_plan_are_refused(moe, name):
    words, sentence = REFUSED[name]
    with pytest.raises(UserError, match=sentence):
        take(moe, read_words(words, moe, explain=explain_for("olmoe"))[1]).validate()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": GPT2Config(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=257)},
         "balance.bias_step=0.1, but a model of gpt2 has no experts; leave --balance.bias_step out"),
        ({"model": replace(OLMOE, corrects_choice=False)}, "have no correction of their choice .*corrects_choice on"),
        ({"balance": BalanceConfig(over="sequence")}, "balance.over=sequence has no effect with balance.loss=0"),
        ({"grpo": Low(group=4), "model": replace(OLMOE, dropout=0.0)}, "the samples that this run makes do not say"),
        ({"lora": LoraConfig(rank=4)}, "the correction that it moves is a weight .* leave these as they are; use"),
    ],
)  # fmt: skip
def test_recipes_that_cannot_be_balanced_are_refused(moe, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        replace(moe, **{"balance": BalanceConfig(bias_step=0.1), **changes}).validate()


def test_files_without_a_place_for_corrections_are_not_written():
    with pytest.raises(UserError, match="no place for the correction of a router's choice"):
        Olmoe().write_config(OLMOE)
    assert json.dumps(Olmoe().write_config(replace(OLMOE, corrects_choice=False)))


def test_a_load_that_starves_makes_no_nan(moe):
    """All tokens choose the same experts; the others have none."""
    trainer = training(moe)
    for router in routers(trainer.stages[0]):
        router.correction.bias.data[2:] = -10
    loss = trainer.train_step()
    figures = balance_of(trainer).metrics()
    assert torch.isfinite(loss.norm) and figures["dead_experts"] == 16 and figures["load_max"] == 3

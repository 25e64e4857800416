"""Runs in fp8: the first step observes, evaluation leaves no trace, and a checkpoint keeps the scales."""

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch

from dtgpt.checkpoint.manifest import read_state, write_state
from dtgpt.checkpoint.shard_file import Damaged
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.optim.fp8.scales import STATE
from dtgpt.planning.memory import fullest, memory_by_rank
from dtgpt.train.loop import train
from dtgpt.train.setup import open_trainer
from dtgpt.train.texts.generate import generate_text
from dtgpt.util.errors import UserError
from tests.support.bodies_fp8 import history_after_resume, record_with_history
from tests.support.ranks import pool
from tests.support.runs import change, losses, newest_run, on_cuda, record
from tests.support.trained import trained

pytestmark = pytest.mark.slow(4)


@pytest.fixture
def recipe(recipe) -> Recipe:
    return replace(recipe, precision="fp8", steps=4)


def state_of(run, step: int) -> dict:
    return json.loads((run / "checkpoints" / f"step_{step:08d}" / "state.json").read_text())


def bits(run, step: int) -> list[bytes]:
    folder = run / "checkpoints" / f"step_{step:08d}"
    return [file.read_bytes() for file in sorted(folder.glob("*.safetensors"))]


def test_the_first_step_is_that_of_bf16_and_later_ones_follow_it(recipe):
    found, exact = record(recipe, 4), record(replace(recipe, precision="bf16"), 4)
    assert found.losses[0] == exact.losses[0] and found.losses[1:] != exact.losses[1:]
    first = [name for name in exact.tensors if name.startswith("first ")]
    assert all(torch.equal(found.tensors[name], exact.tensors[name]) for name in first)
    assert found.losses == pytest.approx(exact.losses, rel=1e-3)


def test_recomputation_changes_no_bit(recipe):
    expected, *others = (
        record_with_history(replace(recipe, recompute=again), 3) for again in ("none", "selective", "full")
    )
    for found in others:
        assert found.history == expected.history and found.record.losses == expected.record.losses
        assert all(torch.equal(value, expected.record.tensors[name]) for name, value in found.record.tensors.items())


def test_a_step_that_observes_computes_blocks_again_and_needs_no_memory_of_its_own(recipe):
    passes = []
    with open_trainer(recipe) as trainer:
        for block in trainer.stages[0].blocks.values():
            block.ln_1.register_forward_hook(lambda *_: passes.append(trainer.step))
        for _ in range(3):
            trainer.train_step()
        once = trainer.settings.micro_batches * len(trainer.stages[0].blocks)
        assert [passes.count(step) for step in range(3)] == [2 * once, once, once]
        planned = fullest(memory_by_rank(trainer.settings))
        exact = fullest(memory_by_rank(replace(trainer.settings, products=None)))
    assert planned.total < exact.total


def test_evaluation_and_texts_between_steps_change_no_bit(recipe):
    quiet = trained(recipe, log={"eval_interval": 0, "sample_tokens": 0})
    talks = trained(change(recipe, log={"eval_interval": 1, "sample_interval": 1}))
    assert losses(quiet) == losses(talks) and bits(quiet, 4) == bits(talks, 4)
    assert state_of(quiet, 4)[STATE] == state_of(talks, 4)[STATE]


def test_texts_are_those_of_a_model_in_16_bits(recipe):
    """As the model that is loaded from the checkpoint generates them."""
    run = trained(change(recipe, log={"temperature": 0.0}))
    with open_trainer(replace(recipe, precision="bf16", log=replace(recipe.log, temperature=0.0)), run) as trainer:
        assert generate_text(trainer) == (run / "samples" / "step_00000004.txt").read_text()


def test_a_resumed_run_equals_an_uninterrupted_one(recipe, tmp_path):
    whole = trained(change(recipe, checkpoint={"interval": 2}))
    parts = change(recipe, runs=str(tmp_path / "parts"), steps=2, optimizer={"decay_steps": 4})
    run = trained(parts)
    assert state_of(run, 2)[STATE] == state_of(whole, 2)[STATE]
    assert train(replace(parts, steps=4, resume=str(run))) == 0
    assert losses(run) == losses(whole) and bits(run, 4) == bits(whole, 4)
    assert state_of(run, 4)[STATE] == state_of(whole, 4)[STATE] and len(state_of(run, 4)[STATE]) == 4


@pytest.mark.parametrize(
    "plan",
    ["tp2_sp", pytest.param("dp2_zero3", marks=pytest.mark.long), pytest.param("pp2_zbv", marks=pytest.mark.long)],
)
def test_a_run_goes_on_under_another_plan_with_its_scales(recipe, plan):
    recipe = change(recipe, micro_batch_size=2, model={"num_layers": 4})  # two stages a rank under zbv
    run = trained(recipe)
    saved = state_of(run, 4)[STATE]
    for history, known in pool().run(parse_plan(plan).world, history_after_resume, replace(recipe, plan=plan), run):
        assert history == saved and known


def test_a_run_in_bf16_goes_on_in_fp8_and_back(recipe):
    """The first step in fp8 observes the values in bf16, and what goes on in bf16 forgets the scales."""
    run = trained(replace(recipe, precision="bf16", steps=2, optimizer=replace(recipe.optimizer, decay_steps=6)))
    assert STATE not in state_of(run, 2)
    assert train(replace(recipe, steps=4, resume=str(run), optimizer=replace(recipe.optimizer, decay_steps=6))) == 0
    assert len(state_of(run, 4)[STATE]) == 2
    again = replace(recipe, precision="bf16", steps=6, resume=str(run))
    assert train(replace(again, optimizer=replace(recipe.optimizer, decay_steps=6))) == 0
    assert STATE not in state_of(run, 6)


def test_a_broken_history_is_a_damaged_checkpoint(recipe):
    folder = trained(replace(recipe, steps=1)) / "checkpoints" / "step_00000001"
    whole = read_state(folder)
    state = {name: value for name, value in whole.items() if name not in ("format", "version", "files")}
    for history in ("12", [["1"]], ["1 2 3"], ["1.5 " * 24]):
        write_state(folder, state | {STATE: history}, {})
        with pytest.raises(Damaged, match=STATE) as error:
            read_state(folder)
        assert "\n" not in str(error.value)


def test_what_cannot_be_trained_in_fp8_is_refused_in_a_sentence(recipe):
    with pytest.raises(UserError, match=r"compile=on, but precision=fp8 .*use --compile off"):
        replace(recipe, compile="on").validate()
    device, plan = torch.device("cuda"), recipe.plan_for(1)
    names = mock.patch("dtgpt.optim.fp8.precision.device_name", return_value="NVIDIA A100")
    with names, mock.patch("dtgpt.util.shared.gpu_limits.has_float8", return_value=False):
        with pytest.raises(UserError, match=r"precision=fp8, but NVIDIA A100 .* 8\.9 .*use --precision bf16"):
            recipe.settings(plan, device)
        assert recipe.settings(plan, device, here=False).products  # as `dtgpt plan` asks


@pytest.mark.cuda
@pytest.mark.parametrize("changes", [{"graph": "off"}, {"recompute": "full"}])
def test_on_a_gpu_captured_steps_have_the_bits_of_others(recipe, changes):
    """By kernels, of which the CPU's reference knows nothing."""
    recipe = on_cuda(recipe, steps=6)
    expected, found = record_with_history(recipe, 6), record_with_history(replace(recipe, **changes), 6)
    assert found.history == expected.history and found.record.losses == expected.record.losses
    assert all(torch.equal(value, expected.record.tensors[name]) for name, value in found.record.tensors.items())


@pytest.mark.parametrize(
    ("changes", "device", "told"),
    [
        ({}, "cpu", "has no CPU kernel"),
        ({}, "cuda", None),
        ({"micro_batch_size": 1, "model": {"seq_length": 24}}, "cuda", "tokens are not a multiple of 16"),
        ({"model": {"hidden_size": 24}}, "cuda", "blocks.*.attn.qkv has 72 x 24 elements"),
        ({"plan": "tp2", "model": {"hidden_size": 16}}, "cuda", "blocks.*.attn.qkv has 24 x 16 elements"),
        ({"plan": "pp2_zbv", "model": {"num_layers": 4}}, "cuda", "ZBVZeroBubble splits backward"),
    ],
)
def test_a_user_is_told_where_fp8_is_slow(recipe, changes, device, told):
    recipe = change(recipe, **changes)
    notes = [note for note in recipe.notes(recipe.planned_choice(None), device) if "fp8" in note or "8-bit" in note]
    assert bool(notes) == bool(told) and (told is None or told in notes[0])


@pytest.mark.parametrize("plan, more", [("single", False), ("tp2_sp", False), ("pp2_zbv", True)])
def test_a_plan_shows_the_memory_of_the_fuller_step(recipe, plan, more):
    """A schedule that splits backward observes without computing again, and keeps 16-bit copies of rounded inputs
    later."""
    recipe = change(
        recipe, plan=plan, device="cuda", micro_batch_size=16, global_batch_size=64, model={"num_layers": 4}
    )
    fp8, bf16 = (fullest(memory_by_rank(replace(recipe, precision=p).planned(None))).total for p in ("fp8", "bf16"))
    assert fp8 > bf16 if more else fp8 < bf16


def test_a_run_says_that_it_is_in_fp8(recipe, capsys):
    assert train(replace(recipe, steps=1)) == 0
    run = newest_run(recipe)
    (start,) = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert start["precision"] == "fp8"
    said = capsys.readouterr()
    assert "precision=fp8 has no CPU kernel" in said.err and "bfloat16, products of blocks in fp8" in said.out

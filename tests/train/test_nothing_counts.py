"""Where no token counts: steps that are none, chats and pairs that are left out, parts without a loss."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from dtgpt.data.prepare.config import PrepareConfig
from dtgpt.data.prepare.job import prepare
from dtgpt.optim.fp16.config import LossScaleConfig
from dtgpt.posttrain.dpo.config import DpoConfig
from dtgpt.posttrain.grpo.answers import advantages_of
from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from dtgpt.train.setup import open_trainer, read_dataset
from dtgpt.util.errors import UserError
from tests.support.bodies_grpo import Low
from tests.support.bodies_train import steps_and_changes
from tests.support.chats import write_tokenizer
from tests.support.ranks import each, pool
from tests.support.runs import change, losses, newest_run

pytestmark = pytest.mark.slow(3)

END, BATCH, LENGTH = 256, 8, 16  # of the tokens of bytes, and of the recipe


def write_steps(path, *kinds):
    """Write the tokens of so many steps: of text after an end, or where a step is "ends", ends of text alone."""
    tokens = np.random.RandomState(0).randint(97, 123, (len(kinds), BATCH * LENGTH))
    tokens[:, 0] = END  # so that a step without the one after it has the same last target
    for step, kind in zip(tokens, kinds, strict=True):
        step[:] = END if kind == "ends" else step
    np.append(tokens, 97).astype("<u2").tofile(path)
    return str(path)


@pytest.fixture
def masked(recipe, tmp_path):
    """Steps in turn, of which the second has ends of text alone, after which nothing counts."""
    text = write_steps(tmp_path / "valid.bin", "text")
    data = {"path": write_steps(tmp_path / "train.bin", "text", "ends", "text", "text"), "valid_path": text,
            "tokenizer": "bytes", "order": "sequential", "eod_mask_loss": True}  # fmt: skip
    log = {"interval": 1, "sample_tokens": 0, "eval_interval": 0}
    return change(recipe, model={"dropout": 0.0}, steps=4, data=data, log=log)


PLANS = {"dp2_zero3": 2, "tp2_sp": 8, "pp2": 2, "cp2": 4}  # with their micro-batches


def test_a_step_without_a_counted_token_is_none_under_every_plan(masked, tmp_path):
    """All others are those of a run without its samples: weights, moments and the learning rate have not moved."""
    path = write_steps(tmp_path / "less.bin", "text", "ends", "text", "text")
    tokens = np.fromfile(path, "<u2")
    np.delete(tokens, slice(BATCH * LENGTH, 2 * BATCH * LENGTH)).tofile(path)
    less = steps_and_changes(change(masked, data={"path": path}), 3)
    assert less.moved == [True] * 3 and less.updates == 3
    cases = [replace(masked, plan=plan, micro_batch_size=size) for plan, size in PLANS.items()]
    (first, second) = pool().run(2, each, steps_and_changes, cases, 4)
    for plan, found in zip(["single", *PLANS, *PLANS], [steps_and_changes(masked, 4), *first, *second], strict=True):
        assert found.moved == [True, False, True, True] and found.updates == 3, plan
        assert found.losses[1] == 0 and found.rates[2] == less.rates[1]
        others = [found.losses[step] for step in (0, 2, 3)]
        assert others == (less.losses if plan == "single" else pytest.approx(less.losses, abs=1e-5)), plan


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_captured_step_without_a_counted_token_is_none(masked, precision, tmp_path):
    path = write_steps(tmp_path / "more.bin", *(["text"] * 4), "ends", "text")
    shape = {"hidden_size": 128, "vocab_size": 384}
    given = change(masked, device="cuda", precision=precision, model=shape, data={"path": path}, steps=6)
    given = change(given, loss_scale=LossScaleConfig(initial=16.0))
    replayed, plain = (steps_and_changes(replace(given, graph=graph), 6) for graph in ("on", "off"))
    for found in (replayed, plain):
        assert found.moved == [True] * 4 + [False, True] and found.updates == 5 and found.losses[4] == 0
    assert replayed.losses == pytest.approx(plain.losses, rel=1e-2)


@pytest.mark.parametrize("changes", [{"precision": "fp16"}, {"optimizer": {"skip_loss_z": 3.0}}])
def test_neither_the_loss_scale_nor_outliers_take_note_of_it(masked, changes):
    found = steps_and_changes(change(masked, loss_scale=LossScaleConfig(initial=16.0), **changes), 4)
    assert found.moved == [True, False, True, True] and found.updates == 3
    if "precision" in changes:
        assert found.state["loss_scale"]["growth_tracker"] == 3 and found.state["loss_scale"]["skipped"] == 0
    else:
        assert len(found.state["outliers"]["window"]) == 3


def test_an_empty_step_leaves_a_scale_as_it_is():
    from dtgpt.optim.fp16.loss_scale import LossScaler

    scaler, no, yes = LossScaler(torch.device("cpu"), LossScaleConfig(window=2)), *map(torch.tensor, (False, True))
    scaler.follow(no, no)
    before = scaler.state()
    scaler.follow(no, no, yes)
    assert scaler.state() == before
    scaler.follow(no, no, no)
    assert scaler.scale.item() == 2.0**33


def test_means_are_over_steps_with_a_loss_and_a_run_goes_on_with_them(masked, capsys, tmp_path):
    train(masked)
    each = losses(newest_run(masked))
    records = {r["step"]: r for r in read_records(newest_run(masked) / "metrics.jsonl")}
    assert "loss" not in records[2] and "step_loss" not in records[2] and records[2]["empty_steps"] == 1
    assert sorted(each) == [1, 3, 4]
    out = capsys.readouterr().out
    assert "step 2/4  1 step without a counted token" in out or "1 step without a counted token" in out
    whole = change(masked, log={"interval": 4}, runs=str(tmp_path / "whole"))
    train(whole)
    mean = losses(newest_run(whole))[4]
    assert mean == pytest.approx(sum(each.values()) / 3, rel=1e-12)
    halves = replace(whole, runs=str(tmp_path / "halves"))
    train(replace(halves, exit_interval=2))
    train(replace(halves, resume="auto"))
    assert losses(newest_run(halves))[4] == mean
    (last,) = [r for r in read_records(newest_run(halves) / "metrics.jsonl") if r["step"] == 4 and "loss" in r]
    assert last["empty_steps"] == 1


def test_a_held_out_part_without_a_counted_token_says_so(masked, capsys, tmp_path):
    ends = write_steps(tmp_path / "ends.bin", "ends")
    train(change(masked, data={"valid_path": ends}, log={"eval_interval": 2}, steps=2))
    told = capsys.readouterr()
    assert (
        "there is no validation loss: no token of 2 batches counts" in told.err and "validation loss 0" not in told.out
    )
    with pytest.raises(UserError, match=r"all tokens of .*ends\.bin are ends of text, after which data\.eod_mask_loss"):
        read_dataset(change(masked, data={"path": write_steps(tmp_path / "ends.bin", "ends", "ends")}, steps=1))


# ---- chats and pairs ----


def prepared(path, rows, **kind):
    folder = write_tokenizer(path / "model")
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"input": path / "rows.jsonl", "tokenizer": str(folder), "workers": 1, "overwrite": True}
    prepare(PrepareConfig(output_prefix=path / "x", **given, **kind))
    return str(path / f"x_{'chat' if 'chat' in kind else 'preference'}_document")


LONG, SHORT = {"prompt": "a" * 90, "completion": "b"}, {"prompt": "a", "completion": "bc"}


@pytest.fixture
def chats(recipe, tmp_path):
    pytest.importorskip("jinja2")
    path = prepared(tmp_path, [LONG] * 12 + [SHORT] * 6 + [LONG] * 2, chat=True)
    return change(
        recipe, model={"seq_length": 64, "vocab_size": 384, "dropout": 0.0}, steps=3, global_batch_size=4,
        micro_batch_size=1, data={"path": path, "split": "18,2,0", "tokenizer": "auto"},
        log={"interval": 3, "sample_tokens": 0, "eval_interval": 3},
    )  # fmt: skip


def test_chats_whose_answers_are_cut_off_are_left_out_and_told(chats, capsys):
    train(chats)
    told = capsys.readouterr()
    assert "12 chats for training left out, in which no token counts within 64 tokens\n" in told.err
    none = "2 chats for validation left out, in which no token counts within 64 tokens; none is left, so that there is"
    assert f"{none} no validation loss" in told.err and "validation loss" not in told.out
    assert "6 chats in 2 samples" in told.out
    run = newest_run(chats)
    (record,) = [r for r in read_records(run / "metrics.jsonl") if r["step"] == 3 and "loss" in r]
    assert record["loss"] > 4 and "empty_steps" not in record
    refused = r"no token of .* counts in samples of 64 tokens: the answers are cut off, or have weight=0"
    with pytest.raises(UserError, match=refused):
        read_dataset(change(chats, data={"split": "10,6,0"}))
    assert newest_run(chats) == run


def test_every_sample_of_chats_has_a_counted_token(chats):
    with open_trainer(change(chats, data={"split": "1,0,0"})) as trainer:
        for step in range(8):
            weights = trainer.batch(step).loss_weights
            assert (weights.sum(1) > 0).all()


def test_pairs_in_which_nothing_counts_are_left_out(recipe, tmp_path, capsys):
    pytest.importorskip("jinja2")
    pairs = [{"prompt": "a", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(6)]
    path = prepared(tmp_path, pairs, preferences=True)
    weights = tmp_path / "x_preference_document.weights"
    whole = np.fromfile(weights, np.uint8)
    first = int(np.flatnonzero(np.diff(whole.astype(int)) == -1)[0]) + 1  # the end of the first answer
    whole[:first] = 0
    whole.tofile(weights)
    wanted = change(
        recipe, model={"seq_length": 128, "vocab_size": 384}, dpo=DpoConfig(beta=0.1),
        data={"path": path, "split": "1,0,0", "tokenizer": "auto"},
    )  # fmt: skip
    dataset = read_dataset(wanted)
    assert len(dataset.train.chats) == 10 and not {0, 1} & set(dataset.train.chats.tolist())
    assert "1 pair for training left out, in which no token counts within 128 tokens" in capsys.readouterr().err
    np.zeros_like(whole).tofile(weights)
    with pytest.raises(UserError, match=r"no token of .* counts in samples of 128 tokens.*or pairs with other answers"):
        read_dataset(wanted)


# ---- rewards ----


@dataclass(frozen=True, kw_only=True)
class Same(Low):
    """Rewards that do not differ in a group from the second step on."""

    def reward(self, index: int, answer: str) -> float:
        return super().reward(index, answer) if index < 2 else 0.1


def test_equal_rewards_have_no_advantage_at_all():
    """Also where their mean is rounded to another number."""
    for loss in ("dr_grpo", "grpo", "dapo"):
        rewards = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, 0.3], dtype=torch.float64)
        found = advantages_of(rewards, Low(group=3, max_new_tokens=4, loss=loss))
        assert found[:3].tolist() == [0.0] * 3 and (found[3:] != 0).all()


def test_a_step_of_groups_without_signal_is_none(recipe):
    grpo = change(
        recipe, model={"dropout": 0.0}, grpo=Same(group=4, max_new_tokens=6), steps=3, plan="dp2",
        log={"sample_tokens": 0, "eval_interval": 0},
    )  # fmt: skip
    for found in pool().run(2, steps_and_changes, grpo, 3):
        assert found.moved == [True, False, False] and found.updates == 1

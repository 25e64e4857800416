import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dtgpt.train.trainer
from dtgpt.checkpoint.manifest import list_checkpoints
from dtgpt.inference.engine import Engine
from dtgpt.models.batch import Batch
from dtgpt.ops.random.dropout import dropout_keys
from dtgpt.ops.random.philox import fold
from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from dtgpt.train.setup import open_trainer, read_dataset
from dtgpt.train.trainer import Trainer
from dtgpt.util.errors import UserError
from tests.support.runs import change, constant, losses, newest_run, training
from tests.support.trained import trained

pytestmark = pytest.mark.slow(7)


@pytest.mark.picture
def test_a_run_folder_holds_all_that_happened(recipe):
    assert train(recipe) == 0
    run = newest_run(recipe)
    assert run.name == "test-001"
    assert json.loads((run / "recipe.json").read_text())["model"]["hidden_size"] == 32
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__ and environment["data"]["digest"]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in (run / "samples").iterdir()] == ["step_00000010.txt"]
    records = read_records(run / "metrics.jsonl")
    assert list(losses(run)) == list(range(1, 11))
    assert [r["step"] for r in records if "validation_loss" in r] == [5, 10]
    assert {"bits_per_byte", "grad_norm", "lr", "tokens", "memory_gib", "tokens_per_second", "eta_seconds"} <= set(
        [r for r in records if "loss" in r][-1]
    )
    checkpoint = run / "checkpoints" / "step_00000010"
    files = {f"{kind}-00000-000.safetensors" for kind in ("weights", "optimizer")}
    assert {p.name for p in checkpoint.iterdir()} == {*files, "state.json"}
    assert (run / "checkpoints" / "latest").read_text() == "step_00000010\n"
    assert train(recipe) == 0
    assert newest_run(recipe).name == "test-002"
    assert losses(newest_run(recipe)) == losses(run)  # the same recipe, the same numbers


def test_the_loss_falls(recipe):
    run = trained(recipe, steps=40, optimizer={"lr": 2e-2}, log={"interval": 10})
    curve = losses(run)
    assert curve[40] < 0.6 * curve[1]
    held_out = [r["validation_loss"] for r in read_records(run / "metrics.jsonl") if "validation_loss" in r]
    assert held_out[-1] < 0.9 * held_out[0]


def test_a_single_batch_is_learnt_by_heart(recipe):
    """Of windows long enough that the ambiguous beginnings, where some agree by chance, weigh little."""
    shape = {"dropout": 0.0, "hidden_size": 64, "seq_length": 64}
    optimizer = {"weight_decay": 0.0, **constant(5e-3)}
    run = training(change(recipe, optimizer=optimizer, model=shape, micro_batch_size=8))
    first = run.objective.batches.take(0)
    for _ in range(120):
        run.objective.batches.take = lambda step: first
        loss, _ = run.train_step()
    assert loss.item() < 0.05


def test_the_curve_does_not_depend_on_the_micro_batch_size(recipe):
    curves = []
    for size in (1, 2, 8):
        run = training(change(recipe, micro_batch_size=size, optimizer=constant(1e-3)))
        curves.append(torch.stack([run.train_step().loss for _ in range(3)]))
    for curve in curves[1:]:
        torch.testing.assert_close(curve, curves[0], rtol=1e-6, atol=0)


def test_dropout_masks_change_with_step_and_sample(recipe):
    """The loss of the same batch on the same weights moves only through its masks."""
    run = training(recipe)
    windows, ids = torch.randint(257, (4, 17)), torch.arange(4)
    values = []
    for step, first in ((0, 0), (1, 0), (0, 0), (0, 4)):
        keys = dropout_keys(fold(run.objective.dropout_key, step), ids + first, recipe.model.num_sites)
        values.append(run.engine.gradients(1, Batch(windows[:, :-1], keys, windows[:, 1:])).item())
    assert values[0] == values[2] and len(set(values)) == 3


@pytest.mark.long  # a minute; the blocks alone are compiled in tests/models/test_llama_block.py
@pytest.mark.compiler
def test_compiled_training_follows_eager_training(recipe):
    curves = []
    for mode in ("off", "on"):
        run = training(change(recipe, compile=mode, optimizer=constant(1e-3)))
        curves.append([run.train_step().loss.item() for _ in range(3)])
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def test_a_held_out_loss_that_is_no_number_is_told_as_that(recipe, monkeypatch):
    monkeypatch.setattr("dtgpt.train.objective.held_out_loss", lambda *_: (float("nan"), float("nan")))
    with pytest.raises(UserError, match=r"has diverged: validation loss and bits/byte at step 5 are nan and nan"):
        train(recipe)


def test_a_stop_request_ends_the_run_with_a_checkpoint(recipe, monkeypatch, capsys):
    done = Trainer.train_step

    def step_then_signal(self):
        result = done(self)
        if self.step == 3:
            os.kill(os.getpid(), 15)
        return result

    monkeypatch.setattr(Trainer, "train_step", step_then_signal)
    assert train(recipe) == 128 + 15
    run = newest_run(recipe)
    assert [c.name for c in list_checkpoints(run / "checkpoints")] == ["step_00000003"]
    assert f"--resume {run}" in capsys.readouterr().out
    monkeypatch.undo()
    assert train(change(recipe, resume=str(run))) == 0
    assert list(losses(run)) == list(range(1, 11))


def test_a_diverged_run_says_so_and_keeps_its_checkpoint(recipe):
    """Also where no progress line is due: weights that are no numbers must not replace good ones."""
    train(change(recipe, steps=2))
    run = newest_run(recipe)
    wild = {"optimizer": {"lr": 1e30, "clip": 0.0, "warmup": 0}, "checkpoint": {"interval": 4, "keep_last": 1}}
    with pytest.raises(UserError, match=r"has diverged: .* at step \d+ are .*(nan|inf).*lower optimizer\.lr"):
        train(change(recipe, resume=str(run), steps=100, log={"interval": 100}, **wild))
    assert [c.name for c in list_checkpoints(run / "checkpoints")] == ["step_00000002"]


@pytest.mark.parametrize("held_out", [0.0, 0.1])
def test_a_run_without_held_out_text_or_samples_works(recipe, held_out):
    train(change(recipe, steps=2, data={"held_out": held_out}, log={"sample_tokens": 0}))
    records = read_records(newest_run(recipe) / "metrics.jsonl")
    assert any("validation_loss" in r for r in records) == (held_out > 0)
    assert not (newest_run(recipe) / "samples").exists()


def test_an_interrupted_sample_is_not_kept(recipe, monkeypatch):
    draw = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: os.kill(os.getpid(), 15) or draw(engine))
    assert train(recipe) == 128 + 15
    assert not (newest_run(recipe) / "samples").exists()
    assert [c.name for c in list_checkpoints(newest_run(recipe) / "checkpoints")] == ["step_00000010"]


def test_a_signal_before_the_first_step_makes_no_run_folder(recipe, monkeypatch):
    build = dtgpt.train.trainer.build_stages
    monkeypatch.setattr(dtgpt.train.trainer, "build_stages", lambda *a: os.kill(os.getpid(), 15) or build(*a))
    assert train(recipe) == 128 + 15
    assert not Path(recipe.runs).exists()


def test_a_signal_saves_also_when_nobody_reads_stderr(recipe, monkeypatch):
    def gone(*_):
        raise BrokenPipeError

    done = Trainer.train_step

    def step_then_signal(self):
        os.kill(os.getpid(), 2)
        return done(self)

    monkeypatch.setattr(Trainer, "train_step", step_then_signal)
    monkeypatch.setattr(os, "write", gone)
    assert train(recipe) == 128 + 2
    assert [c.name for c in list_checkpoints(newest_run(recipe) / "checkpoints")] == ["step_00000001"]


def test_wandb_offline_gets_the_same_records(recipe):
    pytest.importorskip("wandb")
    assert train(change(recipe, steps=3, log={"wandb": "offline"})) == 0
    run = newest_run(recipe)
    assert list((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert (run / "wandb-id").read_text()


def test_samples_on_the_way_are_the_same_again_and_do_not_move_the_curve(recipe):
    runs = []
    for interval in (0, 2, 2):
        train(change(recipe, steps=3, log={"sample_interval": interval, "eval_interval": 0}))
        runs.append(newest_run(recipe))
    assert losses(runs[0]) == losses(runs[1]) == losses(runs[2])
    samples = [{path.name: path.read_bytes() for path in (run / "samples").iterdir()} for run in runs]
    assert samples[1] == samples[2] and len(samples[1]) == 2 and samples[0].items() <= samples[1].items()


def test_the_header_says_how_many_samples_of_each_part_are_used(recipe, capsys):
    data = read_dataset(recipe)
    there, valid = (len(data.train) - 1) // 16, (len(data.valid) - 1) // 16
    train(change(recipe, steps=1, log={"eval_samples": 8}))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("samples "))
    assert line == f"samples 8 to train on ({8 / there:.3g} epochs of {there:,}), 8 of {valid:,} for validation"


def test_the_end_of_a_run_says_how_long_it_took_and_what_to_do_next(recipe, capsys):
    train(change(recipe, steps=2, runs=f"{recipe.runs} of mine"))
    run = newest_run(change(recipe, runs=f"{recipe.runs} of mine"))
    *_, time, where, generate, serve = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"time    \d+s", time) and where == f"run     {run}"
    assert generate == f"next: dtgpt generate '{run}' --interactive" and serve == f"      dtgpt serve '{run}'"
    train(change(recipe, steps=3, resume=str(run)))
    assert re.search(r"\ntime    \d+s since step 2\n", capsys.readouterr().out)
    train(change(recipe, steps=6, resume=str(run), exit_interval=5))
    assert "next: " not in capsys.readouterr().out  # it says how to go on


def test_a_large_model_on_a_cpu_gets_one_line_of_caution(recipe, monkeypatch, capsys):
    monkeypatch.setattr("dtgpt.run.console.report.LARGE_FOR_A_CPU", 30_000)
    train(change(recipe, steps=1, optimizer=constant(1e-3)))
    caution = r"warning: a model of [\d,]+ parameters on a CPU: .* takes about 0s at .*\n"
    assert re.fullmatch(caution, capsys.readouterr().err)


def test_a_vocabulary_much_larger_than_its_tokenizers_gets_one_line_of_caution(recipe, tmp_path, capsys):
    (tmp_path / "few.txt").write_text("the quick brown fox jumps over lazy dogs. " * 40)
    data = {"path": str(tmp_path / "few.txt"), "tokenizer": "char"}
    train(change(recipe, steps=1, optimizer=constant(1e-3), model={"vocab_size": 1024}, data=data))
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "model.vocab_size=1024, but the tokenizer char has 28 tokens: 996 rows" in err
    model = {"vocab_size": 1024}
    read_dataset(change(recipe, model=model, data={"path": None, "tokenizer": "char"}))
    assert "model.vocab_size=1024, but the tokenizer char has " in capsys.readouterr().err
    read_dataset(change(recipe, model=model, data={"path": None, "tokenizer": "bpe", "bpe_vocab_size": 300}))
    assert capsys.readouterr().err == ""  # a first look at a model


def test_the_samples_of_the_first_step_come_again_in_every_step(recipe):
    still = replace(recipe, optimizer=replace(recipe.optimizer, lr=1e-30), model=replace(recipe.model, dropout=0.0))
    found = {}
    for overfit in (True, False):
        with open_trainer(replace(still, data=replace(still.data, overfit=overfit))) as trainer:
            found[overfit] = [trainer.mean_loss(trainer.train_step()) for _ in range(3)]
    assert len(set(found[True])) == 1 and len(set(found[False])) == 3
    assert found[True][0] == found[False][0]


def test_a_run_shows_what_is_asked_for_besides(recipe, capsys):
    train(change(recipe, steps=5, log={"show": "time,ppl,ms"}, checkpoint={"interval": 5}))
    out = capsys.readouterr().out
    assert re.search(r"^step 5/5  \d\d:\d\d:\d\d  loss [\d.]+  ppl [\d.]+  .*[\d.]+ ms ", out, re.MULTILINE)
    assert re.search(r"^step 5: validation loss [\d.]+  ppl [\d.]+  bits/byte", out, re.MULTILINE)
    assert re.search(r"^step 5: checkpoint complete, \d+ MiB$", out, re.MULTILINE)
    (record,) = (r for r in read_records(newest_run(recipe) / "metrics.jsonl") if "validation_loss" in r)
    assert record["validation_perplexity"] == pytest.approx(math.exp(record["validation_loss"]))

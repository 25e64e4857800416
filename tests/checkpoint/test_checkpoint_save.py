"""Saving beside training, what is kept, what fails, and the ways to go on from a checkpoint."""

import errno
import json
import math
import os
import re
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dtgpt.checkpoint.save
import dtgpt.run.folder
import dtgpt.run.stops.limits
from dtgpt.checkpoint import shard_file as host
from dtgpt.checkpoint.background.saver import BackgroundSaver, StagedFile
from dtgpt.checkpoint.load import Saved, find_checkpoint
from dtgpt.checkpoint.manifest import list_checkpoints, quarantine_newer
from dtgpt.config.plan import ResolvedPlan
from dtgpt.parallel.mesh import Mesh
from dtgpt.train.loop import train
from dtgpt.train.trainer import Trainer
from dtgpt.util.errors import UserError
from tests.support.bodies_checkpoint import (
    begun_from,
    save_while_a_rank_is_silent,
    save_without_inodes,
    train_while_a_rank_cannot_write,
)
from tests.support.ranks import pool
from tests.support.runs import change, losses, newest_run
from tests.support.trained import trained

pytestmark = pytest.mark.slow(11)


@pytest.fixture
def recipe(recipe):
    recipe = change(recipe, steps=8, optimizer={"decay_steps": 8}, checkpoint={"interval": 4, "keep_last": 0})
    return change(recipe, data={"held_out": 0.0}, log={"sample_tokens": 0})


def names_in(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def content(folder: Path) -> dict[str, bytes]:
    """Of a checkpoint, without the recipe."""
    found = {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}
    state = json.loads((folder / "state.json").read_text())
    del state["recipe"], state["digest"]  # which have the folder of the runs
    return found | {"state": state}


def run_of(recipe, **changes) -> Path:
    assert train(change(recipe, **changes)) == 0
    return newest_run(recipe)


def saved_at_once(recipe) -> Path:
    """The same run, which waits for its checkpoints."""
    return trained(recipe, checkpoint={"background": False})


def same_checkpoints(run: Path, other: Path) -> bool:
    ours, theirs = ([content(c) for c in list_checkpoints(r / "checkpoints")] for r in (run, other))
    return len(ours) > 0 and ours == theirs


def test_a_checkpoint_is_that_of_its_step_although_training_goes_on(recipe, monkeypatch):
    """Copying is slow, and writing waits until three more steps are done."""
    write, copy, step = host.write_file, StagedFile.copy, Trainer.train_step
    later, waited = threading.Event(), []

    def slow_copy(self):
        time.sleep(0.1)
        copy(self)

    def slow_write(path, *arguments):
        if "step_00000004" in str(path):
            waited.append(later.wait(20))
        return write(path, *arguments)

    def counted(self):
        result = step(self)
        if self.step == 7:
            later.set()
        return result

    monkeypatch.setattr(host, "write_file", slow_write)
    monkeypatch.setattr(StagedFile, "copy", slow_copy)
    monkeypatch.setattr(Trainer, "train_step", counted)
    run = run_of(recipe)
    monkeypatch.undo()
    assert waited == [True, True]  # a file of weights and one of moments
    assert same_checkpoints(run, saved_at_once(recipe))


def test_without_memory_for_copies_training_waits(recipe, monkeypatch):
    reserve, write, threads = StagedFile.reserve, host.write_file, []

    def scarce(self, *arguments, **options):
        if not threads:
            threads.append("no memory")
            raise RuntimeError("no memory")
        return reserve(self, *arguments, **options)

    def look(*arguments):
        threads.append(threading.current_thread().name)
        return write(*arguments)

    monkeypatch.setattr(StagedFile, "reserve", scarce)
    monkeypatch.setattr(host, "write_file", look)
    run = run_of(recipe)
    assert set(threads[1:]) == {"MainThread"}  # written, but not beside the steps
    monkeypatch.undo()
    assert same_checkpoints(run, saved_at_once(recipe))


def fail_at(monkeypatch, step, kind="optimizer", error=None):
    write = host.write_file

    def failing(path, *arguments):
        if f"step_{step:08d}" in str(path) and path.name.startswith(kind):
            raise error or OSError(28, "No space left on device")
        return write(path, *arguments)

    monkeypatch.setattr(host, "write_file", failing)


@pytest.mark.parametrize("background, error", [(True, None), (False, ValueError("whatever it is"))])
def test_a_checkpoint_that_fails_leaves_the_older_one_and_the_run_as_they_are(
    recipe, monkeypatch, capsys, background, error
):
    recipe = change(recipe, checkpoint={"interval": 2, "keep_last": 1, "background": background})
    expected = trained(recipe)
    fail_at(monkeypatch, 4, error=error)
    step, save, seen, savers = Trainer.train_step, BackgroundSaver.save, {}, []

    def look(self):
        result = step(self)
        if self.step == 6 and (runs := list(Path(recipe.runs).glob("test-002"))):
            savers[-1].wait()
            seen[self.step] = names_in(runs[0]), (runs[0] / "checkpoints" / "latest").read_text()
        return result

    def remember(self, *arguments):
        savers.append(self)
        save(self, *arguments)

    monkeypatch.setattr(Trainer, "train_step", look)
    monkeypatch.setattr(BackgroundSaver, "save", remember)
    run = run_of(recipe)
    err = capsys.readouterr().err
    reason = "whatever it is" if error else "No space left on device"
    assert err.count("no checkpoint of step 4 could be written") == 1 and reason in err and "training goes on" in err
    assert seen == {6: (["latest", "step_00000002"], "step_00000002\n")}
    assert losses(run) == losses(expected) and names_in(run) == names_in(expected) == ["latest", "step_00000008"]


def test_a_failure_is_not_lost_where_nothing_can_be_removed_either(recipe, monkeypatch):
    """A disk that was mounted anew, read-only: the run must not end as if it had been saved."""
    fail_at(monkeypatch, 8)
    unlink = Path.unlink

    def read_only(self, *arguments, **options):
        if self.name.endswith(".safetensors"):
            raise OSError(30, "Read-only file system")
        return unlink(self, *arguments, **options)

    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(UserError, match=r"no checkpoint of step 8 .*No space left"):
        train(recipe)


def test_an_old_checkpoint_that_cannot_be_removed_does_not_cost_the_new_one(recipe, monkeypatch, capsys):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(dtgpt.checkpoint.save, "remove", refuse)
    run = run_of(recipe, checkpoint={"keep_last": 1})
    assert names_in(run) == ["latest", "step_00000004", "step_00000008"]
    err = capsys.readouterr().err
    assert "no checkpoint of step" not in err and "Permission denied" in err


def test_nobody_waits_for_a_report_in_a_folder_that_is_gone(tmp_path):
    """The other rank wrote it, and then the run was moved away with it."""
    waiting = SimpleNamespace(mesh=SimpleNamespace(posted=lambda name: None), _alone_at=math.inf, _late_at=math.inf)
    with pytest.raises(UserError, match="gone was moved or removed"):
        BackgroundSaver._report(waiting, tmp_path / "gone", 1)


def test_on_a_full_disk_what_may_go_makes_room_before_a_save(recipe, monkeypatch, capsys):
    """A run that kept all and filled the disk goes on with keep_last 1."""
    run, write = trained(recipe), host.write_file
    assert names_in(run) == ["latest", "step_00000004", "step_00000008"]

    def on_a_disk_for_two(path, *arguments):
        if len(list_checkpoints(path.parents[1])) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *arguments)

    monkeypatch.setattr(host, "write_file", on_a_disk_for_two)
    run_of(recipe, steps=12, resume=str(run), checkpoint={"keep_last": 1})
    assert names_in(run) == ["latest", "step_00000012"] and "could not be written" not in capsys.readouterr().err


@pytest.mark.parametrize("plan, rank", [("dp2_zero1", 0), ("pp2", 1)])
def test_a_rank_that_cannot_write_costs_the_checkpoint_of_all(recipe, plan, rank):
    recipe = change(recipe, plan=plan, steps=6, micro_batch_size=2, checkpoint={"interval": 2})
    (code, said), (other, silent) = pool().run(2, train_while_a_rank_cannot_write, recipe, rank, 4)
    assert code == other == 0 and silent == []
    (sentence,) = said
    assert "no checkpoint of step 4" in sentence and "No space left on device" in sentence
    assert names_in(newest_run(recipe)) == ["latest", "step_00000002", "step_00000006"]
    files = [p.name for p in list_checkpoints(newest_run(recipe) / "checkpoints")[-1].iterdir()]
    assert sorted(files) == ["optimizer-00000-000.safetensors", "optimizer-00001-000.safetensors", "state.json",
                             "weights-00000-000.safetensors", "weights-00001-000.safetensors"]  # fmt: skip


def test_a_rank_that_never_reports_is_named_after_the_timeout(recipe, tmp_path):
    folder = tmp_path / "checkpoints"
    recipe = change(recipe, plan="dp2_zero1", micro_batch_size=2)
    first, second = pool().run(2, save_while_a_rank_is_silent, recipe, folder, 1)
    assert first == second and first[1] is None
    assert first[0].startswith("UserError: no checkpoint of step 1 could be written")
    assert "rank 1 has not written its part within 0.32 s (timeout=0.4)" in first[0]
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step_00000002"]


def test_a_rank_that_can_make_no_file_is_not_waited_for(recipe, tmp_path):
    recipe = change(recipe, plan="dp2_zero1", micro_batch_size=2)
    told = pool().run(2, save_without_inodes, recipe, tmp_path / "checkpoints")
    for rank, (sentence, seconds) in (pair for of_rank in told for pair in enumerate(of_rank)):
        assert seconds < 60  # of a timeout of 600
        assert re.fullmatch(
            r"UserError: no checkpoint of step 1 could be written to .*No space left on device.*\); free space there; "
            "then start again",
            sentence,
        )
        assert ("rank 1: " in sentence) == (rank == 1)


def refuse_threads(monkeypatch, allowed=0):
    """As the system does under a limit on processes, after so many more threads."""
    start, started = threading.Thread.start, []

    def refuse(thread):
        if len(started) >= allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return started


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_where_no_thread_can_be_started_checkpoints_are_written_without(recipe, monkeypatch, capsys, allowed):
    expected = saved_at_once(recipe)
    started = refuse_threads(monkeypatch, allowed)
    run = run_of(recipe)
    assert same_checkpoints(run, expected) and len(started) == allowed
    assert "no checkpoint" not in capsys.readouterr().err
    refuse_threads(monkeypatch)
    if not allowed:
        assert train(change(recipe, resume=str(run), steps=9)) == 0
        assert names_in(run) == ["latest", "step_00000004", "step_00000008", "step_00000009"]


@pytest.mark.parametrize(
    "error, advice",
    [
        (OSError(28, "No space left on device"), "free space there; to go on"),
        (OSError(30, "Read-only file system"), "choose a place that can be written; to go on"),
        (RuntimeError("whatever it is"), r"\(whatever it is\); to go on"),
    ],
)
def test_the_advice_for_a_last_checkpoint_follows_from_what_failed(recipe, monkeypatch, error, advice):
    fail_at(monkeypatch, 8, error=error)
    with pytest.raises(UserError, match=rf"no checkpoint of step 8 .*{advice}, add --resume \S+/test-001$") as refused:
        train(recipe)
    assert ("space" in str(refused.value)) == (getattr(error, "errno", None) == 28)


def planted(folder: Path, target: Path) -> None:
    """Links in a folder of checkpoints, under every name that can be guessed."""
    folder.mkdir(parents=True)
    steps = "step_00000004", "step_00000008", ".partial-step_00000004", ".removed-step_00000004"
    for name in (*steps, ".latest.new", "latest"):
        (folder / name).symlink_to(target)


@pytest.mark.parametrize("kind", ["folder", "file", "dangling"])
def test_links_planted_among_checkpoints_are_replaced_and_not_followed(recipe, tmp_path, monkeypatch, kind):
    target = tmp_path / "precious"
    if kind == "folder":
        target.mkdir()
        (target / "state.json").write_text("mine")
    elif kind == "file":
        target.write_text("mine")
    made = dtgpt.train.loop.create_run

    def create_run(*arguments):
        run = made(*arguments)
        planted(run / "checkpoints", target)
        return run

    monkeypatch.setattr("dtgpt.train.loop.create_run", create_run)
    run = run_of(recipe, checkpoint={"keep_last": 1})
    assert names_in(run) == [".latest.new", "latest", "step_00000008"]
    assert not any(p.is_symlink() for p in (run / "checkpoints").iterdir() if p.name != ".latest.new")
    if kind == "folder":
        assert [p.name for p in target.iterdir()] == ["state.json"] and (target / "state.json").read_text() == "mine"
    assert kind != "file" or target.read_text() == "mine"
    assert kind != "dangling" or not target.exists()


def test_a_link_in_the_way_of_setting_aside_is_left_alone(tmp_path):
    (tmp_path / "step_00000006").mkdir()
    (tmp_path / "aside-step_00000006").symlink_to(tmp_path / "nowhere")
    assert quarantine_newer(tmp_path, 4) == ["aside-1-step_00000006"]
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "keep, kept",
    [
        ({"keep_last": 0, "keep_every": 4}, range(1, 9)),
        ({"keep_last": 1}, [8]),
        ({"keep_last": 2, "keep_every": 3}, [3, 6, 7, 8]),
    ],
)
def test_the_newest_and_multiples_are_kept(recipe, keep, kept):
    run = run_of(recipe, checkpoint={"interval": 1, **keep})
    assert names_in(run) == ["latest", *(f"step_{step:08d}" for step in kept)]
    assert (run / "checkpoints" / "latest").read_text() == "step_00000008\n"


def test_exit_after_ends_with_a_checkpoint_and_what_to_do_next(recipe, monkeypatch, capsys):
    whole = trained(recipe)
    clock, step = SimpleNamespace(now=1000.0), Trainer.train_step

    def train_step(self):
        clock.now = 1000.0 + 60 * 89.9 if self.step < 2 else 1000.0 + 60 * 90  # as step 3 ends
        return step(self)

    monkeypatch.setattr(dtgpt.run.stops.limits, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(Trainer, "train_step", train_step)
    run = run_of(recipe, exit_after=90.0)
    assert run != whole and names_in(run) == ["latest", "step_00000003"]
    told = f"stopped at step 3/8 after 90 minutes (exit_after); to go on, add --resume {run}\n"
    assert told in capsys.readouterr().out
    monkeypatch.undo()
    assert train(change(recipe, resume=str(run))) == 0
    assert losses(run) == losses(whole)


def test_time_that_is_over_before_the_first_step_leaves_nothing(recipe, capsys):
    assert train(change(recipe, exit_after=1e-9)) == 0
    assert not Path(recipe.runs).exists()
    assert capsys.readouterr().out == "stopped before the first step after 1e-09 minutes (exit_after)\n"


def test_exit_interval_ends_with_a_checkpoint_at_each_of_its_multiples(recipe, capsys):
    whole = trained(recipe)
    capsys.readouterr()
    run = run_of(recipe, exit_interval=3)
    for step, later in ((3, 6), (6, 8)):
        assert names_in(run)[-1] == f"step_{step:08d}"
        told = f"stopped at step {step}/8 (exit_interval 3); to go on, add --resume {run}\n"
        assert told in capsys.readouterr().out
        assert train(change(recipe, resume=str(run), exit_interval=3)) == 0
        assert names_in(run)[-1] == f"step_{later:08d}"
    assert losses(run) == losses(whole) and "stopped" not in capsys.readouterr().out
    assert names_in(run_of(recipe, exit_interval=8)) == names_in(whole)
    assert "stopped" not in capsys.readouterr().out


def test_an_older_checkpoint_by_its_path_sets_the_newer_aside(recipe, capsys):
    recipe = change(recipe, checkpoint={"interval": 2})
    run = trained(recipe)
    curve, before = losses(run), content(run / "checkpoints" / "step_00000008")
    for count, steps in enumerate((8, 7)):
        capsys.readouterr()
        train(change(recipe, resume=str(run / "checkpoints" / "step_00000004"), steps=steps))
        prefix = f"aside-{count}-" if count else "aside-"
        out, err = capsys.readouterr()
        assert f"{prefix}step_00000006" in err and "newer than step 4" in err and "from step 4" in out
    assert losses(run) == {step: loss for step, loss in curve.items() if step <= 7}
    asides = ["aside-1-step_00000006", "aside-1-step_00000008", "aside-step_00000006", "aside-step_00000008"]
    steps = ["step_00000002", "step_00000004", "step_00000006", "step_00000007"]
    assert names_in(run) == [*asides, "latest", *steps]
    assert content(run / "checkpoints" / "aside-step_00000008") == before


def test_a_name_that_a_user_left_free_is_no_obstacle_to_setting_aside(tmp_path):
    for name in ("aside-1-step_00000006", "step_00000006"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(name)
    (name,) = quarantine_newer(tmp_path, 4)
    assert (tmp_path / name / "x").read_text() == "step_00000006"
    assert (tmp_path / "aside-1-step_00000006" / "x").read_text() == "aside-1-step_00000006"


def test_resume_auto_begins_a_run_where_there_is_none(recipe, capsys):
    other = trained(recipe, name="other")
    capsys.readouterr()
    run = run_of(recipe, resume="auto")
    assert run.name == "test-001" and losses(run) == losses(other)
    assert "holds no run of test to resume; a new run begins" in capsys.readouterr().out
    (run / "checkpoints").rename(run / "elsewhere")
    assert run_of(recipe, resume="auto").name == "test-002"
    assert "test-001, the newest run of test, holds no checkpoint to resume" in capsys.readouterr().out


def test_resume_auto_does_not_take_a_folder_that_it_cannot_list_for_an_empty_one(recipe, monkeypatch):
    """A run that begins again would not be noticed for days."""
    run, scandir = trained(recipe), os.scandir
    for hidden in (run.parent, run / "checkpoints"):

        def refusing(path=".", hidden=hidden):
            if Path(path) == hidden:
                raise PermissionError(errno.EACCES, "Permission denied")
            return scandir(path)

        with monkeypatch.context() as patched, pytest.raises(UserError) as error:
            patched.setattr(os, "scandir", refusing)
            train(replace(recipe, resume="auto", steps=9))
        assert f"{hidden} cannot be listed (Permission denied)" in str(error.value)
    file = run / "recipe.json"
    with pytest.raises(UserError, match=r"cannot be listed .Not a directory"):
        train(replace(recipe, resume="auto", runs=str(file)))


def test_resume_auto_goes_on_with_the_newest_run(recipe):
    whole = trained(recipe)
    for _ in range(2):
        trained(recipe, steps=5)
    run = run_of(recipe, resume="auto")
    assert run.name == "test-003" and losses(run) == losses(whole)
    assert list(losses(run.with_name("test-002"))) == [1, 2, 3, 4, 5]


def test_resume_auto_leaves_a_finished_run_as_it_is(recipe, capsys):
    run = trained(recipe)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert run_of(recipe, resume="auto") == run
    assert "has done its 8 steps; nothing is left to do" in capsys.readouterr().out
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_resume_auto_begins_again_where_a_run_was_killed_before_its_first_checkpoint(recipe):
    run = trained(recipe)
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints" / ".partial-step_00000004").mkdir(parents=True)
    again = run_of(recipe, resume="auto")
    assert again.name == "test-002" and losses(again) == losses(run)


@pytest.mark.parametrize(
    "before, after, place", [("pp2", "tp2", "."), ("dp2_zero3", "pp2", "checkpoints/step_00000003")]
)
def test_a_new_run_begins_with_the_weights_of_one_under_another_plan(recipe, before, after, place):
    recipe = change(recipe, micro_batch_size=2)
    assert pool().run(2, train, change(recipe, plan=before, steps=3)) == [0, 0]
    run = newest_run(recipe)
    source = Saved(find_checkpoint(Mesh(ResolvedPlan(dp=1), torch.device("cpu")), run))
    target = change(recipe, plan=after, seed=99, init_from=str(run / place))
    (whole, step, finite), (_, _, other) = pool().run(2, begun_from, target)
    assert step == 0 and finite and other
    for name, tensor in whole.items():
        weight, _, moment = name.partition(".exp_avg")
        assert torch.equal(tensor, torch.zeros_like(tensor) if moment or "exp_avg" in name else source.read(weight))


def test_the_first_loss_of_a_run_with_given_weights_is_theirs(recipe):
    """That of the step after which they were saved, on the same samples, whatever the seed of the weights is."""
    first = run_of(recipe, steps=1, optimizer={"lr": 1e-30, "weight_decay": 0.0})  # as initialized
    begun = run_of(recipe, steps=2, init_from=str(first))
    assert losses(begun)[1] == losses(first)[1] and begun != first
    learned = trained(recipe)
    begun = run_of(recipe, steps=2, init_from=str(learned))
    assert losses(begun)[1] < losses(learned)[1] - 0.2 and list(losses(begun)) == [1, 2]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"data": {"tokenizer": "bpe", "bpe_vocab_size": 257}},
         ["another tokenizer", "--data", "dtgpt prepare TEXT --tokenizer "]),
        ({"model": {"num_layers": 3, "hidden_size": 64, "dropout": 0.0}},
         ["another model", "num_layers 2 there, 3 here; hidden_size 32 there, 64 here; give the same --model"]),
        ({"init_from": "nowhere"}, ["nowhere does not exist"]),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_before_a_run_is_made(recipe, text, changes, words):
    text.write_text(text.read_text() + "éé" * 200)  # so that a BPE differs from bytes
    run = run_of(recipe, steps=1)
    with pytest.raises(UserError) as error:
        train(change(recipe, **{"init_from": str(run), **changes}))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert newest_run(recipe) == run


def test_a_mismatch_is_told_field_by_field_and_dropout_may_change(recipe):
    run = trained(recipe, steps=2)
    with pytest.raises(UserError, match=r"num_heads 2 there, 4 here; seq_length 16 there, 8 here") as error:
        train(change(recipe, resume=str(run), model={"num_heads": 4, "seq_length": 8, "dropout": 0.3}))
    assert "dropout" not in str(error.value)
    assert train(replace(change(recipe, model={"dropout": 0.3}), resume=str(run), steps=3)) == 0

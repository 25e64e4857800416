"""What a run leaves on the disk, and going on from it."""

import hashlib
import json
import os
import re
import socket
from pathlib import Path

import pytest

from dtgpt.run.folder import RunLock, run_to_resume
from dtgpt.train.loop import train
from dtgpt.util.errors import UserError
from tests.support.bodies_checkpoint import change_state
from tests.support.runs import change, losses, newest_run
from tests.support.trained import trained

pytestmark = pytest.mark.slow(7)


def test_ten_steps_equal_five_and_a_resume_of_five_bitwise(recipe, tmp_path):
    recipe = change(recipe, optimizer={"decay_steps": 10})
    train(recipe)
    whole = newest_run(recipe)
    train(change(recipe, steps=5, runs=str(tmp_path / "halves")))
    half = tmp_path / "halves" / "test-001"
    assert list(losses(half)) == [1, 2, 3, 4, 5]
    train(change(recipe, resume=str(half)))
    assert losses(half) == losses(whole)
    for name in ("weights", "optimizer"):
        file = f"checkpoints/step_00000010/{name}-00000-000.safetensors"
        assert (half / file).read_bytes() == (whole / file).read_bytes()


def test_a_resume_goes_on_with_the_next_sample_under_another_batch_size(recipe):
    run = trained(recipe, steps=5)
    train(change(recipe, steps=6, global_batch_size=16, resume=str(run)))
    state = json.loads((run / "checkpoints" / "step_00000006" / "state.json").read_text())
    assert state["consumed_samples"] == 5 * 8 + 16


def test_a_run_belongs_to_one_process(recipe):
    run = trained(recipe, steps=5)
    with RunLock() as lock, pytest.raises(UserError, match="being trained by another process"):
        lock.take(run)
        train(change(recipe, resume=str(run)))
    assert train(change(recipe, resume=str(run))) == 0


def test_a_run_that_cannot_save_is_refused_before_data_are_read(recipe, monkeypatch):
    run, access = trained(recipe, steps=5), os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "checkpoints" and access(path, mode))
    monkeypatch.setattr("dtgpt.train.setup.read_dataset", lambda recipe: pytest.fail("data were read"))
    with pytest.raises(UserError, match=r"/checkpoints cannot be written, where the run saves; make it writable"):
        train(change(recipe, resume=str(run)))


def test_resume_auto_does_not_begin_again_where_the_disk_of_checkpoints_is_missing(recipe, tmp_path):
    run, elsewhere = trained(recipe, steps=5), tmp_path / "disk"
    (run / "checkpoints").rename(elsewhere)
    (run / "checkpoints").symlink_to(elsewhere)
    elsewhere.rename(tmp_path / "unmounted")
    with pytest.raises(UserError, match=r"/checkpoints cannot be listed \(No such file"):
        train(change(recipe, resume="auto"))
    (tmp_path / "unmounted").rename(elsewhere)
    assert train(change(recipe, resume="auto")) == 0 and newest_run(recipe) == run


def test_what_to_type_to_go_on_is_quoted(recipe, tmp_path, capsys):
    recipe = change(recipe, steps=5, exit_interval=2, runs=str(tmp_path / "my runs"))
    train(recipe)
    assert f"to go on, add --resume '{newest_run(recipe)}'\n" in capsys.readouterr().out


@pytest.mark.parametrize("steps, told", [(5, True), (3, False)])
def test_a_schedule_in_samples_that_ends_elsewhere_than_the_steps_is_told(recipe, steps, told, capsys):
    """A run of 40 samples whose batch grows would else take steps at a learning rate of 0."""
    recipe = change(recipe, steps=5, global_batch_size=8, optimizer={"warmup": 0, "decay_samples": 40})
    train(change(recipe, exit_interval=2))
    train(change(recipe, resume=str(newest_run(recipe)), global_batch_size=16, steps=steps))
    warning = "5 steps end after 64 samples, the schedule after 40; to end there, give --train_samples 40"
    assert (warning in capsys.readouterr().err) is told


def test_a_resume_says_what_has_changed(recipe, capsys):
    train(change(recipe, steps=5))
    capsys.readouterr()
    train(change(recipe, steps=6, seed=7, resume=str(newest_run(recipe))))
    out = capsys.readouterr().out
    assert "\n  optimizer.decay_steps: 5 -> 6\n  steps: 5 -> 6\n  seed: 1234 -> 7\n" in out


@pytest.mark.parametrize("held_out, told", [(0.05, False), (0.06, True)])
def test_a_run_of_an_older_version_goes_on_with_its_text(recipe, text, held_out, told, capsys):
    """Whose digest of a text was that of its settings and documents, and not that of its tokens."""
    recipe = change(recipe, steps=5, data={"held_out": 0.05})
    train(recipe)
    run = newest_run(recipe)
    settings = {"format": 1, "tokenizer": "bytes", "bpe_vocab_size": recipe.data.bpe_vocab_size, "held_out": held_out}
    former = hashlib.sha256(json.dumps([settings, [text.read_text()]]).encode()).hexdigest()
    change_state(run / "checkpoints" / "step_00000005", {"data_digest": former})
    train(change(recipe, steps=6, resume=str(run)))
    assert ("is not the one that" in capsys.readouterr().err) is told


def test_a_file_system_without_locks_is_no_obstacle(recipe, monkeypatch, capsys):
    def unsupported(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unsupported)
    assert train(change(recipe, steps=2)) == 0
    assert "cannot be locked" in capsys.readouterr().err


def test_only_our_own_checkpoints_are_read_and_removed(recipe):
    train(change(recipe, steps=2, checkpoint={"interval": 1}))
    run = newest_run(recipe)
    folder = run / "checkpoints"
    (folder / "step_00000001").rename(folder / "step_00000001-mine")
    (folder / ".partial-step_00000009-1").mkdir()
    (folder / "step_99").write_text("a file")
    assert train(change(recipe, resume=str(run), checkpoint={"interval": 1, "keep_last": 1})) == 0
    names = {p.name for p in folder.iterdir()}
    assert names == {"step_00000001-mine", "step_99", "step_00000010", "latest"}


@pytest.mark.parametrize(
    "content",
    ["{}", "[]", "5", '{"model": 5}', '{"model": {}}', '{"step": "x"}', '{"step": -1}', '{"data_digest": null}'],
)
def test_a_state_that_is_no_state_is_refused(recipe, content):
    """Also where its digest is right."""
    run = trained(recipe, steps=2)
    folder = run / "checkpoints" / "step_00000002"
    if content.startswith('{"'):
        change_state(folder, json.loads(content))
    else:
        (folder / "state.json").write_text(content)
    with pytest.raises(UserError, match=r"step_00000002/state\.json is damaged .*no other checkpoint is left"):
        train(change(recipe, resume=str(run)))


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("groups, damage, words", [
    ({"resume": "nowhere"}, None, ["nowhere does not exist"]),
    ({"model": {"num_layers": 3}}, None, ["another model", "num_layers 2 there, 3 here"]),
    ({"data": {"tokenizer": "bpe", "bpe_vocab_size": 257}}, None, ["another tokenizer"]),
    ({"steps": 3}, None, ["already done 5 steps", "--steps"]),
    ({}, "weights-00000-000.safetensors", ["weights-00000-000.safetensors is damaged", "bytes", "no other"]),
    ({}, "state.json", ["state.json is damaged", "JSON", "no other checkpoint is left"]),
])  # fmt: skip
def test_a_resume_that_cannot_work_is_refused_and_changes_nothing(recipe, text, groups, damage, words):
    other = text.with_name("accents.txt")  # so that a BPE differs from bytes
    other.write_text(text.read_text() + "éé" * 200)
    recipe = change(recipe, data={"path": str(other)})
    run = trained(recipe, steps=5)
    if damage:
        halve(run / "checkpoints" / "step_00000005" / damage)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(UserError) as error:
        train(change(recipe, **{"resume": str(run), **groups}))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_a_resume_from_within_a_run_takes_the_path_for_what_it_is(recipe, monkeypatch):
    run = trained(recipe, steps=2).resolve()
    checkpoints, step = run / "checkpoints", run / "checkpoints" / "step_00000002"
    (checkpoints / "notes").mkdir()

    def found(folder, path):
        monkeypatch.chdir(folder)
        return run_to_resume(path, Path(recipe.runs), recipe.name)

    assert found(checkpoints, "..") == found(step, "../..") == (run, None)
    assert found(step, ".") == found(checkpoints / "notes", "../step_00000002") == (run, step)
    for folder, path in ((step, ".."), (checkpoints, "."), (run, ".."), (run, "checkpoints/..//..")):
        with pytest.raises(UserError, match=r"is not a run folder \(it has no recipe.json\)"):
            found(folder, path)
    for folder, path in ((checkpoints / "notes", "."), (run, "checkpoints/notes")):
        with pytest.raises(
            UserError, match=r"notes is neither a run nor a checkpoint; give .*, or one of step_00000002$"
        ):
            found(folder, path)


@pytest.mark.parametrize("older", [False, True])
def test_a_resume_without_its_text_says_where_the_run_was_started(recipe, tmp_path, monkeypatch, older):
    (tmp_path / "elsewhere").mkdir()
    text = Path(recipe.data.path)
    monkeypatch.chdir(text.parent)
    train(change(recipe, steps=1, data={"path": text.name}))
    run = newest_run(recipe)
    monkeypatch.chdir(tmp_path / "elsewhere")
    if older:
        (run / "environment.json").write_text("{}")
    where = "another folder" if older else f"{text.parent} on {socket.gethostname()}"
    with pytest.raises(UserError, match=re.escape(f"the run was started in {where}: go on from there")):
        train(change(recipe, steps=2, data={"path": text.name}, resume=str(run)))

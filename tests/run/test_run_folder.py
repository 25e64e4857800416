"""A run folder that is moved, removed or replaced while its run trains."""

import shutil
from pathlib import Path

import pytest

import dtgpt.run.folder
from dtgpt.checkpoint.manifest import list_checkpoints
from dtgpt.run.folder import RunLock
from dtgpt.train.checkpoints import Saving
from dtgpt.train.loop import train
from dtgpt.train.trainer import Trainer
from dtgpt.util.errors import UserError
from tests.support.bodies_train import train_while_the_folder_goes
from tests.support.ranks import pool
from tests.support.runs import change, newest_run

pytestmark = pytest.mark.slow(10)


def move(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def replace(run: Path) -> None:
    shutil.copytree(run, run.with_name("copy"))
    shutil.rmtree(run)
    run.with_name("copy").rename(run)


def remove_above(run: Path) -> None:
    shutil.rmtree(run.parent)


@pytest.mark.parametrize("work", [move, shutil.rmtree, remove_above, replace])
@pytest.mark.parametrize("interval", [1, 100])
def test_a_run_ends_when_its_folder_is_gone_and_writes_nothing_more(recipe, monkeypatch, work, interval):
    """Whether the next that it would write is a record or, a while later, a checkpoint."""
    recipe = change(recipe, steps=10_000, log={"interval": interval, "eval_interval": 0})
    recipe = change(recipe, checkpoint={"interval": 2, "background": False})
    done, gone = Trainer.train_step, []

    def step_then_work(self):
        result = done(self)
        if self.step == 5:
            gone.append(sorted(p for p in newest_run(recipe).rglob("*")))
            work(newest_run(recipe))
        return result

    monkeypatch.setattr(Trainer, "train_step", step_then_work)
    step = "5" if interval == 1 else "[56]"  # 5 on a machine so slow that the look of each second comes first
    with pytest.raises(UserError, match=rf"was moved, removed or replaced .* at step {step}; nothing more is written"):
        train(recipe)
    left = sorted(p for p in Path(recipe.runs).glob("test-001/**/*"))
    assert left == (gone[0] if work is replace else [])


def test_a_folder_that_goes_while_nothing_is_written_is_noticed_within_a_second(recipe, monkeypatch):
    recipe = change(recipe, steps=10**6, log={"interval": 10**6, "eval_interval": 0}, checkpoint={"interval": 0})
    done = Trainer.train_step

    def step_then_move(self):
        result = done(self)
        if self.step == 5:
            move(newest_run(recipe))
        return result

    monkeypatch.setattr(Trainer, "train_step", step_then_move)
    with pytest.raises(UserError, match=r"the run folder .*test-001 was moved, removed or replaced"):
        train(recipe)
    assert not (Path(recipe.runs) / "test-001").exists()


@pytest.mark.parametrize("when", ["the last checkpoint", "the end"])
def test_a_folder_that_goes_at_the_end_is_no_success(recipe, monkeypatch, when):
    from dtgpt.train.texts import generate as samples

    save, generate = Saving.save, samples.generate_text

    def move_at_the_last(self, *arguments, **options):
        if self._trainer.step == recipe.steps and when == "the last checkpoint":
            move(newest_run(recipe))
        return save(self, *arguments, **options)

    def move_then_generate(*arguments):
        if when == "the end":
            move(newest_run(recipe))
        return generate(*arguments)

    monkeypatch.setattr(Saving, "save", move_at_the_last)
    monkeypatch.setattr(samples, "generate_text", move_then_generate)
    with pytest.raises(UserError, match="was moved, removed or replaced"):
        train(recipe)
    assert [p.name for p in Path(recipe.runs).iterdir()] == ["elsewhere"]
    names = [c.name for c in list_checkpoints(Path(recipe.runs) / "elsewhere" / "checkpoints")]
    assert names == (["step_00000010"] if when == "the end" else [])


@pytest.mark.parametrize("plan, background", [("dp2", True), ("pp2", False), ("tp2_sp", True), ("dp2_zero3", False)])
def test_all_ranks_end_when_the_folder_is_gone(recipe, plan, background):
    recipe = change(recipe, steps=1000, plan=plan, micro_batch_size=2, log={"interval": 3, "eval_interval": 0})
    recipe = change(recipe, checkpoint={"interval": 2, "background": background}, data={"held_out": 0.0})
    told = pool().run(2, train_while_the_folder_goes, recipe, 4, timeout=300)
    assert all("was moved, removed or replaced" in words for words in told)
    assert [p.name for p in Path(recipe.runs).iterdir()] == ["elsewhere"]


def test_a_look_at_a_folder_is_rare_unless_it_must_be_at_once(tmp_path, monkeypatch):
    looks = []
    with RunLock() as lock:
        assert not lock.lost(at_once=True)
        lock.take(tmp_path)
        (tmp_path / "lock").unlink()
        monkeypatch.setattr(dtgpt.run.folder.time, "monotonic", lambda: looks.append(1) or 100.0)
        lock._next = 100.5
        assert not lock.lost() and lock.lost(at_once=True) and lock.lost()


def test_a_folder_of_runs_that_cannot_be_written_is_told_before_data_is_read(recipe, monkeypatch, tmp_path):
    monkeypatch.setattr("dtgpt.run.folder.os.access", lambda place, mode, **_: False)
    monkeypatch.setattr("dtgpt.train.setup.read_dataset", lambda recipe: pytest.fail("data was read"))
    with pytest.raises(UserError, match=rf"no run folder can be made there \({tmp_path} cannot be written\)"):
        train(change(recipe, runs=str(tmp_path / "new" / "runs")))

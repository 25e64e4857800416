"""Event files: what TensorBoard's own reader finds in them."""

import errno
import math

import pytest

from dtgpt.charts.tensorboard import FILES, TensorBoard, scalars, summary_writer
from dtgpt.run.records import JsonLines, read_records
from dtgpt.train.loop import train
from dtgpt.util.errors import UserError
from tests.support.runs import change, newest_run

pytest.importorskip("tensorboard")
RECORD = {
    "step": 20, "samples": 640, "loss": 3.5, "step_loss": 3.25, "grad_norm": 0.5, "lr": 1e-3, "batch_size": 32,
    "memory_gib": 0.5, "seconds_per_step": 0.125, "tflops_per_device": 200.0, "loss_scale": 1024.0,
    "forward_seconds": 0.03, "backward_seconds": 0.06, "forward_backward_seconds": 0.1, "optimizer_seconds": 0.01,
    "data_seconds": 0.001, "bits_per_byte": 1.5,
}  # fmt: skip


def points(run) -> dict[str, list[tuple[int, float]]]:
    """The curves of a run: (step or samples, value) by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def sink(run, records=(), step=0) -> TensorBoard:
    return TensorBoard(run, {"steps": 3, "name": "a|b"}, list(records), step)


def test_values_have_the_tags_of_megatron_and_others_their_own_names():
    by_step, by_samples = scalars(RECORD)
    assert by_step == {
        "loss": 3.5, "lm loss": 3.25, "grad-norm": 0.5, "learning-rate": 1e-3, "batch-size": 32,
        "mem-max-allocated-bytes": 2**29, "iteration-time": 0.125, "throughput": 200.0, "loss-scale": 1024.0,
        "forward-compute-time": 0.03, "backward-compute-time": 0.06, "forward-backward-time": 0.1,
        "optimizer-time": 0.01, "batch-generator-time": 0.001, "bits_per_byte": 1.5,
    }  # fmt: skip
    assert by_samples == {
        "lm loss vs samples": 3.25, "grad-norm vs samples": 0.5, "learning-rate vs samples": 1e-3,
        "batch-size vs samples": 32, "loss-scale vs samples": 1024.0,
    }  # fmt: skip


@pytest.mark.parametrize("loss, perplexity", [(2.0, math.exp(2)), (30.0, math.exp(20))])
def test_held_out_losses_have_a_perplexity(loss, perplexity):
    by_step, by_samples = scalars({"step": 5, "validation_loss": loss, "test_loss": None, "note": "x"})
    assert by_step == {"lm loss validation": loss, "lm loss validation ppl": pytest.approx(perplexity)}
    assert {f"{tag} vs samples": value for tag, value in by_step.items()} == by_samples


def test_a_record_is_a_point_of_each_curve_at_once(tmp_path):
    events = sink(tmp_path)
    events.write(RECORD)
    found = points(tmp_path)  # before the file is closed
    assert found["lm loss"] == [(20, 3.25)] and found["lm loss vs samples"] == [(640, 3.25)]
    events.write({**RECORD, "step": 30, "samples": None})
    events.close(failed=False)
    assert points(tmp_path)["grad-norm"] == [(20, 0.5), (30, 0.5)]
    assert points(tmp_path)["grad-norm vs samples"] == [(640, 0.5)]


def test_curves_go_on_after_a_resume_without_what_is_done_again(tmp_path):
    def run(records, former, step):
        events = sink(tmp_path, former, step)
        for at in records:
            events.write({"step": at, "samples": 2 * at, "step_loss": float(at)})
        events.close(failed=False)

    def written(last):
        return [{"step": at, "samples": 2 * at, "step_loss": float(at)} for at in range(1, last + 1)]

    run([1, 2], [], 0)
    run([3, 4], written(2), 2)  # which ended at a checkpoint: its file stays as it is
    assert len(list((tmp_path / "tensorboard").glob(FILES))) == 2
    run([4, 5], written(4), 3)  # killed after step 4, with a checkpoint of step 3
    found = points(tmp_path)
    assert found["lm loss"] == [(at, float(at)) for at in (1, 2, 3, 4, 5)]
    assert found["lm loss vs samples"] == [(2 * at, float(at)) for at in (1, 2, 3, 4, 5)]


def test_a_run_that_had_no_event_files_shows_its_past(tmp_path):
    sink(tmp_path, [{"step": 1, "step_loss": 4.0}, {"step": 2, "step_loss": None}], 2).close(failed=False)
    assert points(tmp_path) == {"lm loss": [(1, 4.0)]}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_raises_where_the_record_is_written_and_does_not_keep_the_run_from_its_end(tmp_path, monkeypatch):
    """The writer's thread meets the error, and the run has to hear of it."""
    events = sink(tmp_path)
    events.write({"step": 1, "step_loss": 1.0})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    file = events._writer.file_writer.event_writer._general_file_writer
    monkeypatch.setattr(file, "write", full)
    with pytest.raises(OSError, match="No space left"):
        events.write({"step": 2, "step_loss": 2.0})
    monkeypatch.setattr(file, "flush", full)
    events.close(failed=False)
    assert points(tmp_path)["lm loss"] == [(1, 1.0)]


def test_nothing_is_written_through_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        sink(tmp_path / "run")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"pip install 'dtgpt\[tensorboard\]'"):
        summary_writer()


def test_a_run_writes_the_curves_of_its_metrics(recipe):
    recipe = change(recipe, steps=6, log={"interval": 2, "eval_interval": 3, "tensorboard": True, "sample_tokens": 0})
    assert train(recipe) == 0
    run = newest_run(recipe)
    records, found = read_records(run / "metrics.jsonl"), points(run)
    losses = [(r["step"], r["step_loss"]) for r in records if "step_loss" in r]
    assert found["lm loss"] == [(step, pytest.approx(loss)) for step, loss in losses]
    size = recipe.global_batch_size
    assert found["lm loss vs samples"] == [(step * size, pytest.approx(loss)) for step, loss in losses]
    held_out = [(r["step"] * size, pytest.approx(r["validation_loss"])) for r in records if "validation_loss" in r]
    assert found["lm loss validation vs samples"] == held_out and [x for x, _ in held_out] == [3 * size, 6 * size]
    assert found["batch-size"] == [(step, size) for step, _ in losses]


def test_metrics_and_events_leave_out_the_same_steps(tmp_path):
    """A resumed run drops records of later steps from both."""
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path)
    for step in (1, 2, 3):
        first.write({"step": step, "step_loss": 1.0})
    first.close(failed=True)
    sink(tmp_path, read_records(path), 2).close(failed=False)
    JsonLines(path, keep_until_step=2).close(failed=False)
    assert [step for step, _ in points(tmp_path)["lm loss"]] == [r["step"] for r in read_records(path)] == [1, 2]


def test_a_full_disk_is_said_and_the_run_goes_on(recipe, monkeypatch, capsys):
    def full(self, record):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TensorBoard, "write", full)
    assert train(change(recipe, steps=2, log={"tensorboard": True, "sample_tokens": 0})) == 0
    assert "step 1 is missing from the metrics" in capsys.readouterr().err
    assert [r["step"] for r in read_records(newest_run(recipe) / "metrics.jsonl") if "loss" in r] == [1, 2]

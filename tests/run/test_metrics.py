import json
from itertools import chain
from pathlib import Path

import pytest

from dtgpt.charts.plot import check_picture, plot_runs, sparkline
from dtgpt.charts.tensorboard import scalars
from dtgpt.cli import main
from dtgpt.compare.history import read_curves
from dtgpt.run.console.line import progress_line
from dtgpt.run.records import JsonLines, read_records
from dtgpt.util.errors import UserError
from dtgpt.util.shared.words import duration

RECORD = {
    "step": 120, "loss": 3.2141, "bits_per_byte": 1.234, "grad_norm": 0.812, "lr": 5.9e-4, "memory_gib": 61.2,
    "memory_total_gib": 139.0, "tokens_per_second": 412_300.0, "mfu": 0.481, "eta_seconds": 45,
}  # fmt: skip


@pytest.mark.parametrize(
    "columns, line",
    [
        (80, "step  120/1000  loss 3.2141  gnorm 0.81  lr 5.9e-4  412k tok/s  mfu 48%  eta 45s"),
        (97, "step  120/1000  loss 3.2141  bits/byte 1.234  gnorm 0.81  lr 5.9e-4  412k tok/s  mfu 48%  eta 45s"),
        (
            200,
            "step  120/1000  loss 3.2141  bits/byte 1.234  gnorm 0.81  lr 5.9e-4  412k tok/s  mfu 48%  "
            "mem 61.2/139 GiB  eta 45s",
        ),
    ],
)
def test_a_progress_line_names_what_fits(monkeypatch, columns, line):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert progress_line(RECORD, 1000) == line and len(line) <= columns


def test_a_progress_line_in_a_file_has_all(monkeypatch):
    """Nobody looks at the width of a log, and what was left out of it is gone."""
    monkeypatch.delenv("COLUMNS", raising=False)
    more = {"tokens_per_second_per_device": 97_000.0, "reward_margin": 0.25, "reward_chosen": -1.5}
    line = progress_line(RECORD | more, 1000)
    expected = (
        "step  120/1000  loss 3.2141  bits/byte 1.234  margin 0.250  chosen -1.500  gnorm 0.81  lr 5.9e-4  412k tok/s  "
        "97k/device  mfu 48%  mem 61.2/139 GiB  eta 45s"
    )
    assert line == expected


def test_a_progress_line_leaves_out_what_is_not_known(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    known = {k: v for k, v in RECORD.items() if k not in ("mfu", "tokens_per_second", "eta_seconds")}
    line = progress_line({**known, "memory_total_gib": None}, 1000)
    assert line == "step  120/1000  loss 3.2141  bits/byte 1.234  gnorm 0.81  lr 5.9e-4"


@pytest.mark.parametrize("more", [{}, {"batch_size": 1536}, {"loss_scale": 65536.0, "skipped_steps": 12}])
@pytest.mark.parametrize("steps", [1000, 500_000])
def test_usual_progress_fits_80_columns(monkeypatch, more, steps):
    monkeypatch.setenv("COLUMNS", "80")
    rates = {"tokens_per_second": 12_412_300.0, "tokens_per_second_per_device": 97_000.0, "eta_seconds": 187_200}
    assert len(progress_line(RECORD | rates | more, steps)) <= 80


@pytest.mark.parametrize("seconds, text", [
    (0, "0s"), (45.4, "45s"), (59.6, "1m 00s"), (90, "1m 30s"), (200, "3m 20s"), (840, "14m 00s"), (3599.6, "1h 00m"),
    (3720, "1h 02m"), (11_100, "3h 05m"), (86_399, "23h 59m"), (187_200, "2d 04h"),
])  # fmt: skip
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


def test_a_sparkline_falls_with_the_loss():
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert len(sparkline(list(range(1000)))) == 60
    assert sparkline([]) == "" and sparkline([2.0, None, float("nan")]) == "▁"


def test_a_sparkline_does_not_stretch_what_hardly_changes():
    assert sparkline([2.5, 2.5001, 2.5003]) == "▁▁▁" and sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([2.51, 2.5, 2.503]) in ("▂▁▁", "▃▁▁", "▂▁▂") and sparkline([3.0, 2.5])[0] == "█"
    assert sparkline([1.7e308, -1.7e308, 2.0, 1.0, 10**400]) == "█▁"  # which no loss is


def test_records_survive_a_killed_process_and_a_resume_drops_what_is_done_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    for step in range(1, 6):
        sink.write({"step": step, "loss": float("nan") if step == 2 else 1.0 / step})
    sink.close(failed=False)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]
    assert read_records(path)[1]["loss"] is None
    path.write_text(path.read_text() + '{"step": 6, "lo\n{"step": 7}\n{"st')  # a full disk, and killed here
    assert [r["step"] for r in read_records(path)] == [1, 2, 3, 4, 5, 7]
    sink = JsonLines(path, keep_until_step=3)
    sink.write({"step": 4, "loss": 0.5})
    sink.close(failed=False)
    assert [r["step"] for r in read_records(path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("cut", [1, 3])
def test_a_record_cut_by_a_full_disk_costs_no_other(tmp_path, cut):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    whole = sink._file

    class Full:
        def write(self, data):
            return whole.write(data[:-cut])

    sink.write({"step": 1})
    sink._file = Full()
    with pytest.raises(OSError, match="part of a record"):
        sink.write({"step": 2})
    with pytest.raises(OSError, match="part of a record"):
        sink.write({"step": 2})
    sink._file = whole
    sink.write({"step": 3})
    sink.close(failed=False)
    kept = [r["step"] for r in read_records(tmp_path / "metrics.jsonl")]
    assert kept[0] == 1 and kept[-1] == 3  # a record without its line end is whole


def test_names_of_older_versions_are_read_as_those_of_today(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1, "valid_loss": 2, "valid_bits_per_byte": 1.5}\n')
    assert read_records(tmp_path / "m.jsonl") == [{"step": 1, "validation_loss": 2, "validation_bits_per_byte": 1.5}]
    assert read_curves(tmp_path / "m.jsonl").of["validation_loss"] == {1: 2.0}


def test_lines_that_are_no_records_are_passed_over(tmp_path):
    (tmp_path / "m.jsonl").write_bytes(b'5\n{"loss": 1}\n\xff\n{"step": 2}\n[1]\nnull\n{"step": null}\n')
    assert read_records(tmp_path / "m.jsonl") == [{"step": 2}]


ODD = ['"x"', "[1]", '{"a": [{}]}', "true", "null", "NaN", "-Infinity", "1e400", "9" * 4000, "1" + "0" * 300, "1.7e308"]
ODD += ["-1", "1.5", '"\\ud800"', "[" * 900 + "]" * 900, '"' + "y" * 100_000 + '"', "9" * 5000, "\xff", '{"st']


ODD_NAMES = ("loss", "validation_loss", "step", "samples", "hella/acc$_$", "test_loss", "\\ud800/a")
GOOD = [b'{"step": 1, "loss": 4, "step_loss": 4}', b'{"step": 3, "loss": 2, "step_loss": 2}']


def odd_lines(value: str) -> list[bytes]:
    """Return a line for each field with this value in it."""
    records = [{"step": "2", "loss": "3", name: value} for name in ODD_NAMES]
    lines = ["{" + ", ".join(f'"{key}": {text}' for key, text in record.items()) + "}" for record in records]
    return [line.encode("latin-1") for line in lines]


@pytest.mark.parametrize("value", ODD)
def test_every_reader_of_metrics_survives_odd_values(tmp_path, value):
    path, odd = tmp_path / "metrics.jsonl", odd_lines(value)
    path.write_bytes(b"\n".join([GOOD[0], *odd, GOOD[1], b'{"step": 4, "lo']))
    records = read_records(path)
    assert [records[i]["loss"] for i in (0, -1)] == [4, 2]
    assert sparkline([r.get("loss") for r in records])
    assert all(by_step["loss"] == record["loss"] for record in records if (by_step := scalars(record)[0]).get("loss"))
    curves = read_curves(path)
    assert curves.of["step_loss"] == {1: 4, 3: 2} and curves.unread >= 1
    JsonLines(path, keep_until_step=2).close(failed=False)
    kept = path.read_bytes().splitlines()
    assert kept[0] == GOOD[0] and set(kept[1:]) <= set(odd)  # as they were


@pytest.mark.slow(1)
def test_odd_values_are_left_out_of_the_picture(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([GOOD[0], *chain.from_iterable(map(odd_lines, ODD)), GOOD[1]]))
    plot_runs([tmp_path], tmp_path / "odd.png")
    assert (tmp_path / "odd.png").is_file()
    path.write_text('{"step": 1, "loss": [1]}\n')
    with pytest.raises(UserError, match="has no losses to draw"):
        plot_runs([tmp_path], tmp_path / "none.png")


def test_output_that_cannot_be_written_is_refused_before_work_is_spent(tmp_path, capsys):
    run = tmp_path / "a-001"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 4}\n')
    dangling = tmp_path / "dangling.png"
    dangling.symlink_to("nowhere/x.png")
    for output in (Path("/proc/x.png"), Path("/sys/x.png"), tmp_path / ("x" * 252 + ".png"), dangling):
        with pytest.raises(UserError, match=r"(cannot be written|is not a file name).*; "):
            check_picture(output)
    with pytest.raises(SystemExit, match="2"):
        main(["plot", str(run), "--output", "/proc/x.png"])
    for words in (["eval", str(run), "--task", "lambada", "--data", str(run)], ["tokenizer", "train", str(run)]):
        with pytest.raises(SystemExit, match="2"):
            main([*words, "--output", "/proc/x.json"])
        assert "/proc/x.json cannot be written" in capsys.readouterr().err
    check_picture(tmp_path / "loss.png")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a-001", "dangling.png"]


def test_runs_are_overlaid_in_one_png(tmp_path):
    runs = [tmp_path / "runs" / name for name in ("a-001", "b-001")]
    for run in runs:
        run.mkdir(parents=True)
        sink = JsonLines(run / "metrics.jsonl")
        for step in range(1, 6):
            sink.write({"step": step, "loss": 5 / step})
            sink.write({"step": step, "validation_loss": 6 / step})
        sink.close(failed=False)
    plot_runs(runs, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="has no losses to draw"):
        plot_runs([*runs, tmp_path], tmp_path / "other.png")
    assert not (tmp_path / "other.png").exists()

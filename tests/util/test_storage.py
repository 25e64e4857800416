"""Files are written beside and renamed, never through a link; a lock names its holder and waits for nobody."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dtgpt.run.folder
from dtgpt.charts.plot import plot_runs
from dtgpt.data.megatron.indexed import IndexedWriter
from dtgpt.data.prepare.target import lock_prefix
from dtgpt.run.folder import RunLock
from dtgpt.run.records import JsonLines
from dtgpt.train.loop import train
from dtgpt.util.errors import UserError
from dtgpt.util.storage import FileLock, Held, atomic_file, remove_leftovers, remove_tree, write_text
from tests.support.runs import change, losses, newest_run

pytestmark = pytest.mark.slow(3)

ME = f"pid {os.getpid()} on "


def test_a_file_appears_when_it_is_whole_with_the_mode_of_the_umask(tmp_path):
    former = os.umask(0o027)
    try:
        with atomic_file(tmp_path / "x") as file:
            file.write(b"new")
            assert not (tmp_path / "x").exists()
    finally:
        os.umask(former)
    assert (tmp_path / "x").read_bytes() == b"new" and (tmp_path / "x").stat().st_mode & 0o777 == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), OSError(28, "full")])
def test_a_file_that_fails_half_way_leaves_the_former_one_alone(tmp_path, error):
    write_text(tmp_path / "x", "before")
    with pytest.raises(type(error)) as raised, atomic_file(tmp_path / "x") as file:
        file.write(b"half")
        raise error
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"x": "before"}
    assert not isinstance(error, OSError) or raised.value.filename == str(tmp_path / "x")


def test_a_link_is_replaced_by_the_file_and_its_target_kept(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "x").symlink_to(tmp_path / "precious")
    write_text(tmp_path / "x", "new")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "x").read_text() == "new" and not (tmp_path / "x").is_symlink()


def test_a_device_is_not_replaced_by_a_file(monkeypatch):
    monkeypatch.setattr(Path, "replace", None)  # so that this machine keeps its own
    with pytest.raises(OSError, match="not a regular file"):
        write_text(Path("/dev/null"), "new")
    assert Path("/dev/null").is_char_device()


def test_what_killed_processes_left_is_removed_but_not_through_a_link(tmp_path):
    for folder in ("mine", "others"):
        (tmp_path / folder).mkdir()
        for name in (".recipe.json.0123abcd.new", ".recipe.json.new", "x.0123abcd.new", ".out.bin.1234.new"):
            (tmp_path / folder / name).write_text("half")
    (tmp_path / "link").symlink_to(tmp_path / "others")
    for folder in ("mine", "link", "nowhere"):
        remove_leftovers(tmp_path / folder)
    kept = [".out.bin.1234.new", ".recipe.json.new", "x.0123abcd.new"]
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == kept
    assert len(list((tmp_path / "others").iterdir())) == 4


def test_a_removed_link_costs_its_target_nothing(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "x").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    remove_tree(tmp_path / "link")
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "precious" / "x").exists()
    remove_tree(tmp_path / "precious")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_names_its_holder(tmp_path):
    with FileLock(tmp_path / "lock"):
        assert re.fullmatch(rf"{ME}\S+\n", (tmp_path / "lock").read_text())
        with pytest.raises(Held, match=rf"another process \({ME}\S+\)"), FileLock(tmp_path / "lock"):
            pass
        with pytest.raises(UserError, match=rf"is being trained by another process \({ME}\S+\); wait"):
            RunLock().take(tmp_path)


@pytest.mark.parametrize("content", ["", "x" * 9999, "pid 1 on \x1b[31m\n", "pid -1 on a b\n", "\xff\n"])
def test_a_holder_that_cannot_be_one_is_not_named(tmp_path, content):
    with FileLock(tmp_path / "lock"):
        (tmp_path / "lock").write_text(content)
        with pytest.raises(Held, match=r"^another process$"), FileLock(tmp_path / "lock"):
            pass


@pytest.mark.parametrize("content", ["", "pid 1 on elsewhere\n" * 3])
def test_the_lock_of_a_process_that_is_gone_is_taken_over(tmp_path, content):
    (tmp_path / "lock").write_text(content)
    code = "import os, dtgpt.util.storage as s, pathlib\n"
    code += f"s.FileLock(pathlib.Path({str(tmp_path / 'lock')!r})).__enter__()\n"
    subprocess.run([sys.executable, "-c", code + "os.kill(os.getpid(), 9)"], check=False)
    for _ in range(2):
        with RunLock() as lock:
            lock.take(tmp_path)
            assert re.fullmatch(rf"{ME}\S+\n", (tmp_path / "lock").read_text())


def test_a_lock_that_waits_gets_its_turn(tmp_path):
    code = f"import sys, dtgpt.util.storage as s, pathlib\nwith s.FileLock(pathlib.Path({str(tmp_path / 'lock')!r})):\n"
    command = [sys.executable, "-c", code + " print('held', flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(Held, match=f"pid {other.pid} on "), FileLock(tmp_path / "lock"):
            pass
        other.stdin.close()
        with FileLock(tmp_path / "lock", wait=True, remove=True):
            assert (tmp_path / "lock").read_text().startswith(ME)
    assert not (tmp_path / "lock").exists()


def special(path: Path, kind: str, target: Path) -> None:
    if kind == "link":
        path.symlink_to(target)
    elif kind == "hard link":
        path.hardlink_to(target)
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["link", "hard link", "FIFO", "folder"])
def test_a_lock_that_is_no_file_of_its_own_is_refused_at_once(tmp_path, kind):
    (tmp_path / "precious").write_text("mine")
    special(tmp_path / "lock", kind, tmp_path / "precious")
    special(tmp_path / ".out.lock", kind, tmp_path / "precious")
    for lock in (lambda: RunLock().take(tmp_path), lock_prefix(tmp_path / "out").__enter__):
        with pytest.raises(UserError, match=r"lock is not a regular file with one name, .*; remove it$"):
            lock()
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_lock_in_a_folder_that_cannot_be_written_is_refused_with_the_remedy(tmp_path, monkeypatch):
    def read_only(path, *_):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr("dtgpt.util.storage.os.open", read_only)
    with pytest.raises(
        UserError, match=r"lock cannot be written \(Read-only file system\); choose a place that can be"
    ):
        RunLock().take(tmp_path)


NAMES = ["lock", "metrics.jsonl", "metrics.partial", ".recipe.json.new", "recipe.json", "environment.json", "loss.png",
         ".environment.json.new", ".tokenizer.json.new", "tokenizer.json", ".loss.png.partial", "wandb-id",
         "starts.jsonl"]  # fmt: skip


@pytest.fixture(params=["link", "FIFO"])
def planting(request, monkeypatch, tmp_path):
    """Let a run find links to a file of somebody else, or FIFOs, where it wants to write. Returns that file."""
    precious, made = tmp_path / "precious", dtgpt.train.loop.create_run
    precious.write_text("mine")

    def create_run(*arguments):
        run = made(*arguments)
        for name in NAMES[1:]:
            special(run / name, request.param, precious)
        (run / "samples").mkdir()
        for step in (5, 10):
            special(run / "samples" / f"step_{step:08d}.txt", request.param, precious)
        return run

    monkeypatch.setattr("dtgpt.train.loop.create_run", create_run)
    return precious


@pytest.mark.picture
def test_links_and_fifos_planted_in_a_run_folder_are_replaced_and_not_opened(recipe, planting):
    recipe = change(recipe, log={"sample_interval": 5, "wandb": "offline"})
    assert train(recipe) == 0
    run = newest_run(recipe)
    assert planting.read_text() == "mine" and sorted(losses(run)) == list(range(1, 11))
    written = [*NAMES[1:2], *NAMES[4:7], "tokenizer.json", *NAMES[-2:], *(f"samples/step_{s:08d}.txt" for s in (5, 10))]
    plain = [name for name in written if (run / name).is_file() and not (run / name).is_symlink()]
    assert plain == [name for name in written if name != "loss.png" or (run / name).is_file()]


def test_samples_are_not_written_through_a_link(recipe, tmp_path, monkeypatch, capsys):
    (tmp_path / "elsewhere").mkdir()
    made = dtgpt.train.loop.create_run

    def create_run(*arguments):
        run = made(*arguments)
        (run / "samples").symlink_to(tmp_path / "elsewhere")
        return run

    monkeypatch.setattr("dtgpt.train.loop.create_run", create_run)
    assert train(change(recipe, steps=1)) == 0
    assert list((tmp_path / "elsewhere").iterdir()) == [] and "is a link" in capsys.readouterr().err


def test_metrics_and_plot_of_a_planted_link_leave_its_target_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text('{"step": 1, "loss": 2.0}\n')
    before = (tmp_path / "precious").read_bytes()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "precious")
    (tmp_path / "x.png").symlink_to(tmp_path / "precious")
    sink = JsonLines(tmp_path / "run" / "metrics.jsonl", keep_until_step=1)
    sink.write({"step": 2, "loss": 1.0})
    sink.close(failed=False)
    plot_runs([tmp_path / "run"], tmp_path / "x.png")
    assert (tmp_path / "precious").read_bytes() == before
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG") and not (tmp_path / "x.png").is_symlink()


def test_a_dataset_is_not_written_through_a_link(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda _: "0123abcd")
    (tmp_path / "precious").write_text("mine")
    for suffix in ("bin", "idx"):
        (tmp_path / f".out.{suffix}.0123abcd.new").symlink_to(tmp_path / "precious")
        (tmp_path / f"out.{suffix}").symlink_to(tmp_path / "precious")
    with IndexedWriter(tmp_path / "out", "uint16") as writer:
        writer.append([1, 2, 3])
    assert (tmp_path / "precious").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.bin", "out.idx", "precious"]
    assert not any(p.is_symlink() for p in tmp_path.iterdir())

"""A dataset's name belongs to one preparation at a time, and what a killed one leaves is mended by the next."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from dtgpt.data.megatron.indexed import IndexedDataset, IndexedWriter
from dtgpt.data.prepare.target import lock_prefix
from dtgpt.util.errors import UserError
from tests.support.prepared import leftovers, run, words_of

RENAMES = """
import os, pathlib, sys
from dtgpt.data.prepare.command import command as prepare_command
rename, done = pathlib.Path.rename, []
def until_killed(path, target):
    if len(done) == int(sys.argv[1]):
        os.kill(os.getpid(), 9)
    done.append(rename(path, target))
pathlib.Path.rename = until_killed
prepare_command(sys.argv[2:])
"""


def test_a_second_preparation_is_refused_at_its_start(tmp_path):
    with lock_prefix(tmp_path / "out_text_document"):
        with pytest.raises(UserError, match=r"is being written by another process \(pid \d+ on .*\); wait, or"):
            run(tmp_path, [{"text": "a"}])
        assert leftovers(tmp_path) == [".out_text_document.lock"]
    _, dataset = run(tmp_path, [{"text": "a"}])
    assert words_of(dataset) == ["a"] and len(leftovers(tmp_path)) == 3


def test_a_lock_that_its_holder_has_just_removed_does_not_count(tmp_path, monkeypatch):
    lock, real, tries = tmp_path / ".out.lock", fcntl.flock, []

    def flock(file, how):
        tries.append(how)
        if len(tries) == 1:
            os.unlink(lock)
        real(file, how)

    monkeypatch.setattr("fcntl.flock", flock)
    with lock_prefix(tmp_path / "out"):
        assert len(tries) == 2 and lock.exists()


def test_without_locks_nobody_elses_files_are_touched(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    (tmp_path / ".out.bin.0123abcd.new").write_bytes(b"x")
    with lock_prefix(tmp_path / "out"):
        assert (tmp_path / ".out.bin.0123abcd.new").exists()
    assert "cannot be locked (No locks available)" in capsys.readouterr().err


def test_leftovers_of_killed_preparations_are_removed_and_others_kept(tmp_path, capsys):
    for name in (
        ".out_text_document.bin.0123abcd.new",
        ".out_text_document.idx.0123abcd.new",
        ".out_text_document.lock",
    ):
        (tmp_path / name).write_bytes(b"half")
    others = [".out_text_document.bin.old.new", ".out_text_documents.bin.0123abcd.new"]
    for name in others:
        (tmp_path / name).write_bytes(b"other")
    run(tmp_path, [{"text": "a"}])
    assert leftovers(tmp_path) == sorted(
        [*others, *(f"out_text_document.{suffix}" for suffix in ("bin", "idx", "tokenizer.json"))]
    )
    assert capsys.readouterr().err.count("is removed") == 2


@pytest.mark.slow(1)
@pytest.mark.parametrize("former", [False, True])
@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_preparation_killed_between_its_renames_loses_nothing(tmp_path, capsys, former, renames):
    if former:
        run(tmp_path, [{"text": "old"}])
    (tmp_path / "new.jsonl").write_text('{"text": "new text"}\n')
    words = [str(tmp_path / "new.jsonl"), "--tokenizer", "bytes", "--workers", "1", "--overwrite"]
    command = [sys.executable, "-c", RENAMES, str(renames), *words, "--output-prefix", str(tmp_path / "out")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    with pytest.raises(UserError, match="exists already"):
        run(tmp_path, [{"text": "third"}], overwrite=False)
    assert words_of(IndexedDataset(tmp_path / "out_text_document")) == ["new text"]
    assert "it is in place now" in capsys.readouterr().err and len(leftovers(tmp_path)) == 3


def test_a_half_written_index_is_not_put_in_place(tmp_path):
    with IndexedWriter(tmp_path / "x", "uint16") as writer:
        writer.append([1, 2, 3])
    (tmp_path / "x.bin").rename(tmp_path / ".out.bin.01234567.new")
    (tmp_path / ".out.idx.01234567.new").write_bytes((tmp_path / "x.idx").read_bytes()[:-3])
    with lock_prefix(tmp_path / "out"):
        assert leftovers(tmp_path) == [".out.lock"]


def test_all_keys_of_a_killed_preparation_are_put_in_place_together(tmp_path):
    (tmp_path / "new.jsonl").write_text('{"a": "x", "b": "y"}\n')
    words = [str(tmp_path / "new.jsonl"), "--tokenizer", "bytes", "--workers", "1", "--json-keys", "a", "b"]
    command = [sys.executable, "-c", RENAMES, "0", *words, "--output-prefix", str(tmp_path / "out")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    with pytest.raises(UserError, match="exists already"):
        run(tmp_path, [{"a": "x", "b": "y"}], json_keys=("a", "b"), overwrite=False)
    assert [words_of(IndexedDataset(tmp_path / f"out_{key}_document")) for key in "ab"] == [["x"], ["y"]]


def test_a_folder_is_not_replaced_by_a_dataset(tmp_path):
    run(tmp_path, [{"text": "a"}])
    (tmp_path / "out_text_document.bin").unlink()
    (tmp_path / "out_text_document.bin").mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"out_text_document\.bin is a folder; give another --output-prefix"):
        run(tmp_path, [{"text": "a"}], overwrite=True)
    assert sorted(tmp_path.iterdir()) == before


def test_folders_made_for_a_run_that_fails_are_removed_and_others_kept(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="no key"):
        run(tmp_path, [{"no": 1}], strict=True, output_prefix=str(tmp_path / "mine" / "a" / "b" / "out"))
    assert (tmp_path / "mine").is_dir() and not (tmp_path / "mine" / "a").exists()


def test_a_folder_that_may_not_be_written_to_is_told(tmp_path, monkeypatch):
    def refuse(path):  # root may write everywhere
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with pytest.raises(UserError, match=r"/proc/out_text_document cannot be written"):
        run(tmp_path, [{"text": "a"}], output_prefix="/proc/out")
    monkeypatch.setattr("dtgpt.data.prepare.target.try_to_write", refuse)
    with pytest.raises(UserError, match=r"out_text_document cannot be written \(Permission denied\)"):
        run(tmp_path, [{"text": "a"}], output_prefix=str(tmp_path / "deep" / "out"))
    assert not (tmp_path / "deep").exists()


def test_a_prefix_below_a_file_is_refused_in_the_right_words(tmp_path):
    (tmp_path / "file").write_text("x")
    for prefix in ("file/out", "file/deep/out"):
        with pytest.raises(UserError, match="would lie in a file, not in a folder; give another --output-prefix"):
            run(tmp_path, [{"text": "a"}], output_prefix=str(tmp_path / prefix))

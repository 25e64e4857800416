"""A disk that returns EIO when it is read or written: one sentence, and nothing half written.

Reads: /proc/self/mem is a regular file whose first byte cannot be read. Writes: `fsync` fails, which comes last.
"""

import errno
import os
import shutil
import sys
from pathlib import Path

import pytest

from dtgpt.data.prepare.job import PrepareConfig, prepare
from dtgpt.train.loop import train
from dtgpt.util.errors import UserError
from tests.commands.test_cli import in_process
from tests.support.runs import change, newest_run

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/mem"), pytest.mark.slow(5)]
UNREADABLE = "/proc/self/mem"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def models(recipe, made, tmp_path, documents, monkeypatch, capsys):
    """Enter a folder with a run, its model in each format, and prepared data: copies of what was made once."""
    if not list(made.iterdir()):
        monkeypatch.chdir(made)
        train(change(recipe, steps=1, log={"eval_interval": 0, "sample_tokens": 0}))
        shutil.copytree(newest_run(recipe), "run")
        for kind in ("hf", "megatron", "dtgpt"):
            assert in_process(["convert", "run", kind, "--to", kind], capsys)[0] == 0
        Path("data").mkdir()
        prepare(PrepareConfig(input=[str(documents)], output_prefix="data/x", tokenizer="bytes", workers=1))
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def failing(file: Path) -> None:
    file.unlink()
    file.symlink_to(UNREADABLE)


def one_sentence(code: int, err: str, what: str) -> None:
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert code in (0, 2) and "Traceback" not in err and len(lines) == (code == 2), f"{what}: {code} {err}"


COMMANDS = {
    "run": [["inspect", "run"], ["convert", "run", "out"], ["plot", "run"], ["compare", "run", "run"]],
    "dtgpt": [["convert", "dtgpt", "out", "--to", "hf"]],
    "hf": [["convert", "hf", "out", "--to", "hf"]],
    "megatron": [["convert", "megatron", "out"]],
    "data": [["inspect", "data/x_text_document"]],
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_file_that_cannot_be_read_is_told(models, capsys, kind):
    files = [file for file in Path(kind).rglob("*") if file.is_file() and not file.is_symlink()]
    refused = 0
    for file in files:
        content = file.read_bytes()
        failing(file)
        for words in COMMANDS[kind]:
            code, _, err = in_process(words, capsys)
            one_sentence(code, err, f"{words} without {file}")
            refused += code == 2
            assert code == 0 or not Path("out").exists()
            assert not [path for path in Path.cwd().iterdir() if "partial" in path.name]
            shutil.rmtree("out", ignore_errors=True)
        file.unlink()
        file.write_bytes(content)
    assert refused >= 2


def test_texts_and_token_files_that_cannot_be_read_end_a_run_before_it_begins(recipe, models, documents, capsys):
    for name, data in (
        (documents, {"path": str(documents)}),
        (Path("data/x_text_document.bin"), {"path": "data/x_text_document", "tokenizer": "auto"}),
        (Path("data/x_text_document.idx"), {"path": "data/x_text_document", "tokenizer": "auto"}),
        (Path("data/x_text_document.tokenizer.json"), {"path": "data/x_text_document", "tokenizer": "auto"}),
    ):
        content = name.read_bytes()
        failing(name)
        with pytest.raises(UserError) as error:
            train(change(recipe, name="other", data=data))
        assert "\n" not in str(error.value) and name.name in str(error.value)
        assert not list(Path(recipe.runs).glob("other*"))
        name.unlink()
        name.write_bytes(content)


@pytest.fixture
def failing_sync(monkeypatch):
    """A function after whose call the nth `fsync` fails, and all that follow."""
    sync, left = os.fsync, [10**9]

    def fsync(descriptor):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return lambda nth: left.__setitem__(0, nth)


@pytest.mark.parametrize("kind", ["hf", "megatron", "dtgpt", "data"])
def test_a_write_that_fails_leaves_nothing(models, capsys, failing_sync, documents, kind):
    words = ["convert", "run", "out", "--to", kind]
    if kind == "data":
        words = ["prepare", documents, "--output-prefix", "out", "--tokenizer", "bytes", "--workers", 1]
    before = set(Path.cwd().iterdir())
    for nth in range(3):
        failing_sync(nth)
        code, _, err = in_process(words, capsys)
        one_sentence(code, err, f"{words} {nth}")
        assert code == 2 and "Input/output error" in err, err
        assert {path for path in Path.cwd().iterdir() if not path.name.startswith(".")} == before
    failing_sync(10**9)
    assert in_process(words, capsys)[0] == 0


def test_a_run_whose_files_cannot_be_written_goes_on_afterwards(recipe, failing_sync, capsys):
    """From whatever was on the disk: the same weights as without a fault."""
    recipe = change(recipe, steps=2, log={"sample_tokens": 0, "eval_interval": 0})
    train(recipe)
    run = newest_run(recipe)
    for nth in (0, 2, 4, 8):
        failing_sync(nth)
        try:
            train(change(recipe, steps=4 + nth, resume=str(run)))
        except (UserError, OSError) as error:  # the command tells both in one sentence
            assert "Input/output error" in str(error) and "\n" not in str(error)
        failing_sync(10**9)
        assert train(change(recipe, steps=4 + nth, resume=str(run))) == 0
        assert not list(run.rglob("*.new")) and not list(run.rglob("*partial*"))
    assert "Traceback" not in capsys.readouterr().err

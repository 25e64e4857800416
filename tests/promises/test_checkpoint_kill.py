"""SIGKILL at any moment: the run goes on with --resume auto, and its losses are those of a run that nobody killed.

The attempts of a run are forks of `python -m tests.promises.test_checkpoint_kill`, which has imported everything and
has no threads: they are the program from its command line on, but begin at once.
DTGPT_KILLS=30 pytest tests/promises/test_checkpoint_kill.py -k random kills 30 runs, up to three times each.
"""

import json
import os
import pkgutil
import random
import shutil
import signal
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from tests.support.pictures import no_pictures
from tests.support.programs import run_program

pytestmark = pytest.mark.slow(16)

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("DTGPT_KILLS", "3"))
STEPS, AT = 6, 4
OPTIONS = {
    "model.hidden_size": 32, "model.num_heads": 2, "model.seq_length": 16, "model.vocab_size": 257,
    "model.dropout": 0.1, "micro_batch_size": 4, "global_batch_size": 8, "steps": STEPS, "device": "cpu",
    "data.path": "text.txt", "data.tokenizer": "bytes", "data.held_out": 0.0, "log.interval": 1,
    "log.sample_tokens": 0, "checkpoint.interval": 1, "resume": "auto",
}  # fmt: skip


class Moment(NamedTuple):
    """So many seconds after the run has told of so many steps."""

    steps: int
    delay: float

    def wait_for(self, folder: Path) -> None:
        end = time.monotonic() + 60
        while steps_told(folder) < self.steps and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(self.delay)


def steps_told(folder: Path) -> int:
    return sum(path.read_bytes().count(b"grad_norm") for path in sorted(folder.glob("runs/*/metrics.jsonl"))[-1:])


def die(*_, **__) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # of this thread: the process is gone


def dies_in(target: str, when, first=lambda *arguments: None):
    """Replace `target` by what dies when `when(*arguments)` is true, after it has done `first`."""
    original = pkgutil.resolve_name(target)

    def replaced(*arguments, **options):
        if when(*arguments):
            first(*arguments)
            die()
        return original(*arguments, **options)

    return mock.patch(target, replaced)


def of_step(*arguments) -> bool:
    return f"step_{AT:08d}" in str(arguments[0])


def half_a_file(path, pieces, data) -> None:
    path.write_bytes(bytes(data.numpy())[: data.nbytes // 2])


def half_a_text(path, text) -> None:
    path.with_name(f".{path.name}.0123abcd.new").write_text(text[: len(text) // 2])


def one_file_less(path, **_) -> None:
    min(path.iterdir()).unlink()


def removes_old(path, *_) -> bool:
    return ".removed-" in path.name and path.exists()


FOLDER = "dtgpt.checkpoint.manifest"
POINTS = {  # where the process dies, at step 4 or after it
    "weights half written": ("dtgpt.checkpoint.shard_file.write_file", lambda p, *_: of_step(p), half_a_file),
    "before state.json": (f"{FOLDER}.write_text", lambda p, _: p.name == "state.json" and of_step(p.parent)),
    "state.json half": (f"{FOLDER}.write_text", lambda p, _: p.name == "state.json" and of_step(p.parent), half_a_text),
    "before the rename": (f"{FOLDER}.sync_path", of_step),
    "before latest": (f"{FOLDER}.write_text", lambda p, text: p.name == "latest" and of_step(text)),
    "latest half": (f"{FOLDER}.write_text", lambda p, text: p.name == "latest" and of_step(text), half_a_text),
    "amid a removal": ("shutil.rmtree", removes_old, one_file_less),
    "before a removal": ("dtgpt.checkpoint.save.remove", lambda *_: True),
}
BEGUN = POINTS["before latest"]
AGAIN = {  # while a run goes on that died there
    "before its files are written": ("dtgpt.run.report.describe_run", lambda *_: True),
    "recipe.json half": ("dtgpt.util.storage.write_text", lambda p, _: p.name == "recipe.json", half_a_text),
    "metrics half": ("dtgpt.run.report.JsonLines", lambda p, **_: True),
    "tokenizer.json half": (
        "dtgpt.data.tokenizers.tokenizer.write_text", lambda p, _: p.name == "tokenizer.json", half_a_text,
    ),
    "before make_folder": ("dtgpt.checkpoint.save.make_folder", lambda _, step: step == AT + 1),
}  # fmt: skip


def attempt(folder: Path, kill) -> int:
    """The exit code of one process, negative where a signal ended it. `kill`: when it dies, where it does, or None."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.chdir(folder)
            log = os.open("log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            from dtgpt.cli import main

            words = [w for k, v in OPTIONS.items() for w in (f"--{k}", str(v))]
            with no_pictures(), dies_in(*kill) if type(kill) is tuple else nullcontext():
                try:
                    main(["train", str(ROOT / "recipes" / "gpt2_tiny.py"), *words])
                except SystemExit as end:
                    sys.stdout.flush()
                    os._exit(end.code or 0)
        os._exit(99)
    if isinstance(kill, Moment):
        kill.wait_for(folder)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def outcome(folder: Path, kills: list, begun: Path | None = None) -> dict:
    """What came of a run, or of a copy of one that is begun, that was killed so often: exit codes, and what the last
    run folder holds."""
    if begun:
        shutil.copytree(begun, folder, symlinks=True)
    else:
        folder.mkdir()
        (folder / "text.txt").write_text("".join(f"{i} and {i + 1} make {2 * i + 1}.\n" for i in range(400)))
    codes = [attempt(folder, kill) for kill in kills]
    run = max((folder / "runs").iterdir())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [(r["step"], r["loss"], r["grad_norm"]) for r in records if "loss" in r]
    last = run / "checkpoints" / f"step_{STEPS:08d}"
    files = {p.name: p.read_bytes().hex() for p in last.glob("*.safetensors")}
    names = sorted(p.name for p in (run / "checkpoints").iterdir())
    found = {"curve": curve, "files": files, "names": names}
    return {"codes": codes, "found": found, "log": (folder / "log").read_text()[-2000:]}


def experiments(what: str) -> dict[str, list]:
    """Kills of the attempts of a run, by name."""
    if what == "points":
        return {name: [point] for name, point in (POINTS | AGAIN).items()}
    rng = random.Random(int(os.environ.get("DTGPT_KILLS_SEED", "5")))
    return {f"random {i}": random_moments(rng) for i in range(KILLS)}


def random_moments(rng: random.Random) -> list[Moment]:
    """One to three, each later than the one before; a step and its checkpoint take some 30 ms, a start 300."""
    steps = sorted(rng.randrange(STEPS) for _ in range(rng.randint(1, 3)))
    return [Moment(n, rng.uniform(0, 0.03 if n else 0.3)) for n in steps]


def drive(what: str, root: Path) -> None:
    """All experiments: a line of JSON for each."""
    root.mkdir(exist_ok=True)
    whole = outcome(root / "whole", [None])
    if what == "points":
        outcome(root / "begun", [BEGUN])
    for number, (name, kills) in enumerate(experiments(what).items()):
        try:
            end = outcome(root / f"try-{number}", [*kills, None], root / "begun" if name in AGAIN else None)
            same = end["found"] == whole["found"]
            print(json.dumps({"name": name, "same": same, "codes": end["codes"], "log": "" if same else end["log"]}))
        except Exception as error:
            print(json.dumps({"name": name, "same": False, "codes": [], "log": repr(error)}))
        shutil.rmtree(root / f"try-{number}")
    print(json.dumps({"name": "whole", "codes": whole["codes"], "steps": len(whole["found"]["curve"])}))


def answers(what: str, root: Path) -> dict[str, list[int]]:
    """Return the exit codes of each experiment, all of which end as a run that nobody killed."""
    command = ["-m", "tests.promises.test_checkpoint_kill", what, str(root)]
    done = run_program(command, ROOT, timeout=120 + 20 * KILLS)
    assert done.returncode == 0, done.stderr
    found = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert found.pop("whole") == {"name": "whole", "codes": [0], "steps": STEPS}
    assert [line for line in found.values() if not line["same"]] == []
    return {name: line["codes"] for name, line in found.items()}


def test_a_run_that_died_at_a_point_goes_on_as_if_nothing_had_been(tmp_path):
    assert answers("points", tmp_path) == {name: [-signal.SIGKILL, 0] for name in POINTS | AGAIN}


def test_a_run_that_died_at_random_moments_goes_on_as_if_nothing_had_been(tmp_path):
    found = answers("random", tmp_path)
    assert len(found) == KILLS
    ends = {(codes[0], codes[-1]) for codes in found.values()}
    assert ends == {(-signal.SIGKILL, 0)}, found


if __name__ == "__main__":
    os.environ["DTGPT_CACHE"] = f"{sys.argv[2]}-cache"
    sys.stdout.reconfigure(line_buffering=True)
    drive(sys.argv[1], Path(sys.argv[2]))

"""What asks a run to end, and what must not: signals, a terminal that is closed, a launcher that is gone."""

import json
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from dtgpt.cli import main
from dtgpt.run.folder import RunLock
from dtgpt.run.stop_request import StopRequest
from dtgpt.run.stops.signals import Signals
from dtgpt.train.loop import train
from dtgpt.train.trainer import Trainer
from tests.support.programs import TORCHRUN, Program
from tests.support.runs import newest_run

pytestmark = pytest.mark.slow(11)

ROOT = Path(__file__).parents[2]
TINY = ROOT / "recipes" / "gpt2_tiny.py"
SMALL = ["--model.hidden_size", "32", "--model.num_heads", "2", "--model.seq_length", "16", "--device", "cpu"]
SMALL += ["--log.eval_samples", "8", "--micro_batch_size", "4", "--global_batch_size", "4"]
ENDLESS = [str(TINY), *SMALL, "--steps", "1000000", "--log.interval", "5", "--checkpoint.interval", "0"]


def train_with(recipe, number: int) -> int:
    """The exit code of a run that gets a signal during its third step."""
    done = Trainer.train_step

    def step_then_signal(self):
        if self.step == 2:
            os.kill(os.getpid(), number)
        return done(self)

    with mock.patch.object(Trainer, "train_step", step_then_signal):
        return train(recipe)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_with_a_checkpoint_and_its_exit_code(recipe, number):
    assert train_with(recipe, number) == 128 + number
    assert (newest_run(recipe) / "checkpoints" / "step_00000003").is_dir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_at_the_start_stays_ignored(recipe, number):
    """As under nohup, and in the background of a script."""
    former = signal.signal(number, signal.SIG_IGN)
    try:
        assert train_with(recipe, number) == 0
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, former)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_processes_forked_in_a_run_end_at_a_signal_as_before_it(number):
    """As those of a `multiprocessing.Pool` in a reward, which is ended by SIGTERM."""
    with StopRequest() as stop:
        if not (child := os.fork()):
            try:
                time.sleep(20)
            finally:
                os._exit(3)
        time.sleep(0.1)
        os.kill(child, number)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (-number if number == signal.SIGTERM else 3) and not stop
        before = time.monotonic()
        with multiprocessing.get_context("fork").Pool(2) as workers:
            assert workers.map(abs, [-1, -2]) == [1, 2]
        assert time.monotonic() - before < 10


def test_a_signal_that_comes_while_a_process_is_forked_ends_it(monkeypatch):
    """As that of a pool which ends while its processes begin: Python forgets a signal whose handler is gone."""
    restore = Signals.restore_handlers

    def restore_after_signal(self):
        os.kill(os.getpid(), signal.SIGTERM)
        restore(self)

    with StopRequest() as stop:
        monkeypatch.setattr(Signals, "restore_handlers", restore_after_signal)
        if not (child := os.fork()):
            os._exit(3)
        monkeypatch.undo()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not stop and not signal.pthread_sigmask(signal.SIG_BLOCK, ())
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.requested == signal.SIGHUP


def test_a_second_hangup_is_no_haste_but_a_second_interrupt_is():
    with StopRequest() as stop, mock.patch("os._exit") as end:
        os.kill(os.getpid(), signal.SIGHUP)
        stop._first -= 3
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.requested == signal.SIGHUP and not end.called
        os.kill(os.getpid(), signal.SIGINT)
        assert end.call_args == mock.call(130)


def wait_for(condition, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def step_of(run: Path) -> int:
    """The last step in a run's metrics, 0 before there is one."""
    try:
        return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    except (OSError, IndexError, ValueError):
        return 0


IN_TERMINAL = """
import os, sys
terminal = os.open(sys.argv[1], os.O_RDWR)  # of which a process that has begun a session takes control
for number in (0, 1, 2):
    os.dup2(terminal, number)
from dtgpt.cli import main
main(sys.argv[2:])
"""


def test_a_closed_terminal_ends_a_run_with_a_checkpoint(tmp_path):
    """The kernel sends SIGHUP, and every later line to the terminal is an input/output error."""
    terminal, theirs = pty.openpty()
    words = ["-c", IN_TERMINAL, os.ttyname(theirs), "train", *ENDLESS]
    process = Program(words, tmp_path, start_new_session=True)
    run = tmp_path / "runs" / "gpt2_tiny-001"
    try:
        wait_for(lambda: step_of(run) >= 5)
    finally:
        os.close(theirs)
        os.close(terminal)
    assert process.wait(60) == 128 + signal.SIGHUP
    (checkpoint,) = (run / "checkpoints").glob("step_*")
    assert int(checkpoint.name.removeprefix("step_")) >= step_of(run) > 0


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_ranks_end_with_a_checkpoint_when_their_torchrun_is_killed(tmp_path):
    process = Program([*TORCHRUN, "--nproc-per-node", "2", *ENDLESS, "--plan", "tp2"], tmp_path)
    run = tmp_path / "runs" / "gpt2_tiny-001"
    try:
        wait_for(lambda: step_of(run) >= 5)
        ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    finally:
        process.kill()
        process.wait()
    try:
        wait_for(lambda: not any(map(running, ranks)))
    finally:
        for pid in filter(running, ranks):
            os.kill(pid, signal.SIGKILL)
    log = process.stdout.read() + process.stderr.read()
    assert log.count(f"dtgpt: torchrun (process {process.pid}) is gone") == 1 and "Traceback" not in log
    (checkpoint,) = (run / "checkpoints").glob("step_*")
    assert len(ranks) == 2 and f"stopped at step {int(checkpoint.name.removeprefix('step_'))}/" in log
    with RunLock() as lock:
        lock.take(run)  # nobody else holds it


@pytest.mark.parametrize("start", [[], ["-m", "dtgpt", "train"]])
def test_an_interrupt_while_modules_are_imported_ends_without_a_traceback(tmp_path, start):
    """Also where the import would catch it, as C++ code that runs Python does."""
    module = "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(9)\nexcept: pass\n"
    (tmp_path / "slow.py").write_text(module)
    (tmp_path / "mine.py").write_text("from dtgpt.cli import run_recipe\nimport slow\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, *start, "mine.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "dtgpt: interrupted\n")


def test_an_interrupt_before_the_first_step_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupt = mock.patch("dtgpt.train.setup.read_dataset", lambda _: os.kill(os.getpid(), signal.SIGINT))
        with interrupt, pytest.raises(SystemExit) as end:
            main(["train", str(TINY), "--device", "cpu"])
    finally:
        signal.signal(signal.SIGINT, former)
    assert end.value.code == 130 and capsys.readouterr() == ("", "dtgpt: interrupted\n")
    assert not list(tmp_path.iterdir())


def orphan(lines: str, **variables: str) -> subprocess.Popen:
    """A process that runs `lines` after its parent has gone; its output ends when it does."""
    program = (
        "import os, signal, sys, time\n"
        "from dtgpt.run.stops import signals\n"
        "from dtgpt import liveness\nfrom dtgpt.liveness import orphans\n"
        "orphans.POLL = orphans.ORPHAN = 0.1\n"
        "if os.fork(): time.sleep(0.3); os._exit(0)\n"
        f"signals.LAUNCHER = os.getppid()\n{lines}\n"
        "print('went on', flush=True)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TORCHELASTIC_RUN_ID"} | variables
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def test_an_orphan_ends_within_its_time_although_it_hangs_and_at_once_before_the_loop():
    follow = "liveness.follow_launcher()\nwhile True: time.sleep(60)"
    in_the_loop = f"signals.Signals().__enter__()\n{follow}"
    for lines, words in ((in_the_loop, "SIGTERM: ending after this step"), (follow, "is gone")):
        out, _ = orphan(lines, TORCHELASTIC_RUN_ID="none").communicate(timeout=300)
        assert words in out and "went on" not in out


def test_a_process_that_torchrun_did_not_start_outlives_its_parent():
    out, _ = orphan("liveness.follow_launcher()\ntime.sleep(0.8)").communicate(timeout=300)
    assert out == "went on\n"


SPEAK = """
from dtgpt.util.console import close_streams, prepare_streams, say, say_error
prepare_streams()
file = open("file", "w+")
say("one")
say_error("two")
import contextlib, os
for number in (1, 2):
    with contextlib.suppress(OSError):
        os.write(number, b"three")
say("four")
close_streams()
assert file.read() == "", file.name
raise SystemExit(7)
"""


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ">&- 2>&-", "2>&-", ">&-", "> /dev/full 2> /dev/full"])
def test_streams_that_are_gone_change_neither_files_nor_the_exit_code(tmp_path, streams):
    command = [sys.executable, "-c", SPEAK.replace('"file"', repr(str(tmp_path / "file")))]
    script = 'exec "$@" ' + streams
    done = subprocess.run(["sh", "-c", script, "sh", *command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 7, done.stderr
    assert "Traceback" not in done.stderr + done.stdout

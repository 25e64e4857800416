"""`dtgpt train RECIPE.py --nproc N`: processes, signals, and what users read last."""

import errno
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from dtgpt.cli import main
from dtgpt.liveness import launcher
from dtgpt.liveness.launcher import Children, environment
from tests.support.programs import TORCHRUN, Program, run_program

TINY = Path(__file__).parents[2] / "recipes" / "gpt2_tiny.py"
SMALL = ["--model.hidden_size", "32", "--model.num_heads", "2", "--model.seq_length", "16", "--device", "cpu"]
SMALL += [
    "--micro_batch_size",
    "16",
    "--log.eval_samples",
    "8",
    "--log.sample_tokens",
    "0",
    "--data.tokenizer",
    "bytes",
]


@pytest.fixture
def alone(monkeypatch):
    """No launcher has started this process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def in_process(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return stop.value.code, *capsys.readouterr()


def launched(code: str, number: int = 3) -> Children:
    """Processes that run `code`, in which `rank` is theirs."""
    begin = "import os, signal, sys, time; rank = int(os.environ['RANK'])\n"
    return Children(["-S", "-c", begin + code], number, 1)


@pytest.mark.slow(2)
def test_a_run_in_two_processes(tmp_path):
    words = ["-m", "dtgpt", "train", TINY, *SMALL, "--steps", "2", "--plan", "tp2", "--nproc", "2"]
    done = run_program(words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "plan    tp2" in done.stdout and "device  2 x CPU" in done.stdout and done.stdout.count("step 2/2") == 1
    assert (tmp_path / "runs/gpt2_tiny-001/checkpoints/step_00000002").is_dir()


@pytest.mark.slow(3)
def test_a_signal_ends_the_run_with_a_checkpoint_and_a_lost_rank_is_named_last(tmp_path):
    words = [TINY, *SMALL, "--steps", "400", "--log.interval", "1", "--nproc-per-node", "2"]
    program = Program(words, tmp_path)
    assert any(re.match(r"step +3/", line) for line in program.stdout)
    program.terminate()
    out, err = program.communicate(60)
    assert program.returncode == 128 + signal.SIGTERM, err
    assert "stopped at step" in out and "Traceback" not in err
    assert list((tmp_path / "runs/gpt2_tiny-001/checkpoints").glob("step_*"))

    program = Program([*words, "--resume", "auto"], tmp_path)
    assert any(re.match(r"step +\d+/", line) for line in program.stdout)
    children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    lost = max(map(int, children))
    os.kill(lost, signal.SIGKILL)
    _, err = program.communicate(60)
    last = err.splitlines()[-1]
    assert program.returncode == 128 + signal.SIGKILL and "Traceback" not in err
    assert f"rank 1 of 2 (process {lost}) was ended by SIGKILL" in last and "--resume auto" in last
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


@pytest.mark.parametrize("words, sentence", [
    (["--stepz", "3"], "there is no option --stepz; did you mean --steps?"), (["--plan", "tp3"], "tp=3"),
    (["--optimizer.lr", "-1"], "optimizer.lr"), (["--nproc", "0"], "nproc=0"), (["--nproc", "two"], "--nproc two"),
    (["--nproc", "5000"], "nproc=5000"),
])  # fmt: skip
def test_a_mistake_is_one_sentence_before_anything_is_started(alone, capsys, monkeypatch, words, sentence):
    monkeypatch.setattr(launcher, "Popen", None)
    words = ["--nproc", "2", *words] if "--nproc" not in words else words
    code, out, err = in_process(["train", TINY, *words], capsys)
    assert (code, out) == (2, "") and sentence in err and err.count("\n") == 1


def test_a_plan_that_needs_more_processes_names_the_command(alone, capsys):
    code, _, err = in_process(["train", TINY, "--plan", "tp2_pp2_gpipe", "--log.prompt", "it is"], capsys)
    assert code == 2
    assert err.endswith(f"such as: dtgpt train {TINY} --plan tp2_pp2_gpipe --log.prompt 'it is' --nproc 4\n")


def test_another_mistake_does_not(alone, capsys):
    for words in (["--plan", "tp2", "--optimizer.lr", "-1"], ["--plan", "zz2"]):
        assert "such as: dtgpt" not in in_process(["train", TINY, *words], capsys)[2]


def test_another_launcher_has_started_the_processes(capsys, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    code, _, err = in_process(["train", TINY, "--nproc", "4"], capsys)
    assert code == 2 and "--nproc is 4, but another launcher, such as torchrun, started 2 processes" in err


def test_the_rank_that_torch_distributed_launch_adds_is_left_out(capsys, monkeypatch):
    words = ["plan", TINY, *SMALL, "--local-rank=3"]
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert in_process(words, capsys)[0] == 0
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert "torchrun sets the rank" in in_process(words, capsys)[2]


def test_variables_are_those_of_torchrun(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = environment(3, 8, 4321)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS")
    assert [found[name] for name in names] == ["3", "3", "8", "8", "4321", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert environment(3, 8, 4321)["OMP_NUM_THREADS"] == "5"


def test_exit_codes(capfd):
    assert launched("").run() == 0
    assert launched("sys.exit(7 * (rank == 1))").run() == 7
    assert "dtgpt: rank 1 of 3 (process " in (err := capfd.readouterr().err) and "exit code 7" in err
    assert launched("sys.exit(2 * (rank == 2))").run() == 2
    assert capfd.readouterr().err == ""  # it has said why


def test_others_end_soon_after_rank_0_has_said_why(monkeypatch):
    monkeypatch.setattr(launcher, "SAID", 0.1)
    children = launched("sys.exit(2) if rank == 0 else time.sleep(60)")
    begin = time.monotonic()
    assert children.run() == 2 and time.monotonic() - begin < 40
    assert [child.returncode for child in children.started] == [2, -signal.SIGTERM, -signal.SIGTERM]


@pytest.mark.slow(3)
def test_what_hears_no_signal_is_killed(monkeypatch, capfd):
    monkeypatch.setattr(launcher, "GRACE", 1.0)
    monkeypatch.setattr(launcher, "PATIENCE", 2.0)
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    children = launched(f"{deaf}os.kill(os.getpid(), signal.SIGABRT) if rank == 1 else time.sleep(60)")
    assert children.run() == 128 + signal.SIGABRT
    assert [child.returncode for child in children.started] == [-signal.SIGKILL, -signal.SIGABRT, -signal.SIGKILL]
    assert "rank 1 of 3" in (last := capfd.readouterr().err.splitlines()[-1]) and "SIGABRT" in last


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(tmp_path, number):
    listen = (
        f"signal.signal({int(number)}, lambda *_: sys.exit(0))\n"
        f"open({str(tmp_path)!r} + '/' + str(rank), 'w').close()\ntime.sleep(60)"
    )

    def send():
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    before = signal.getsignal(number)
    assert launched(listen).run() == 0 and signal.getsignal(number) is before


def test_processes_that_cannot_be_started_are_one_sentence(alone, capsys, monkeypatch):
    started, real = [], launcher.Popen

    def fail(words, env):
        if started:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(real([sys.executable, "-S", "-c", "import time; time.sleep(60)"]))
        return started[0]

    monkeypatch.setattr(launcher, "Popen", fail)
    code, _, err = in_process(["train", TINY, "--nproc", "2", "--plan", "tp2"], capsys)
    assert code == 2 and err.count("\n") == 1
    assert "process 2 of 2 cannot be started (Resource temporarily unavailable); use a smaller --nproc" in err
    assert started[0].poll() == -signal.SIGTERM


@pytest.mark.slow(1)
def test_the_report_of_torchrun_ends_with_the_sentence(tmp_path):
    done = run_program([*TORCHRUN, "--nproc-per-node", "2", TINY, "--stepz", "3"], tmp_path)
    root = done.stderr.partition("Root Cause")[2]
    assert done.returncode == 1 and "traceback : dtgpt: there is no option --stepz; did you mean --steps?" in root


def test_the_sentence_is_written_where_torchrun_looks_for_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    in_process(["train", TINY, "--stepz", "3"], capsys)
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"].startswith("dtgpt: there is no opti")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    assert in_process(["train", TINY, "--stepz", "3"], capsys)[0] == 2


@pytest.mark.parametrize("plan", ["tp3", "tp2_pp100", "pp2_interleaved9"])
def test_a_number_of_processes_is_advised_only_where_the_plan_can_run(alone, plan, capsys):
    code, out, err = in_process(["train", TINY, "--plan", plan], capsys)
    assert code == 2 and "--nproc" not in err and "such as" not in err and not out

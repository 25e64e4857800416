"""Ranks that no alternative of a plan fits: they wait, the losses stay, and whatever ends the run ends them too."""

import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from dtgpt.run.records import read_records
from tests.support.forked_ranks import fork_rank
from tests.support.programs import run_program

pytestmark = pytest.mark.slow(6)

ROOT = Path(__file__).parents[2]
STEPS = 6
OPTIONS = {
    "data.tokenizer": "bytes", "model.num_layers": 2, "model.hidden_size": 16, "model.num_heads": 2,
    "model.seq_length": 16, "steps": STEPS, "global_batch_size": 4, "micro_batch_size": 1, "device": "cpu",
    "log.sample_tokens": 0, "log.eval_interval": 0, "log.interval": 1, "timeout": 60, "resume": "auto",
    "optimizer.decay_steps": STEPS,
}  # fmt: skip


class Case(NamedTuple):
    """A start of `world` processes with more options. act: called with the process ids once step 2 is reported. codes:
    the exit codes; None: of a rank that is killed."""

    world: int
    options: dict
    codes: list[int | None]
    act: Callable[[list[int]], None] | None = None


def signal_to(number: int, *ranks: int) -> Callable[[list[int]], None]:
    return lambda pids: [os.kill(pids[rank], number) for rank in ranks]


LONG = {"steps": 100_000, "checkpoint.interval": 1000}
NAMED = {"plan": "dp4 | dp2 | single"}
STOPPED = 128 + signal.SIGTERM
CASES = {
    "three of four": Case(3, {**NAMED, "exit_interval": 2}, [0, 0, 0]),
    "four": Case(4, {"exit_interval": 4}, [0] * 4),
    "one": Case(1, {"exit_interval": 5}, [0]),
    "three again": Case(3, {}, [0, 0, 0]),
    "alone": Case(3, {"plan": "single | tp3 | dp5", "name": "alone"}, [0] * 3),
    "nobody waits": Case(2, {**NAMED, "name": "two"}, [0] * 2),
    "a signal to one that waits": Case(3, {**NAMED, **LONG, "name": "s"}, [STOPPED] * 3, signal_to(15, 2)),
    "a signal to one that works": Case(3, {**NAMED, **LONG, "name": "t"}, [STOPPED] * 3, signal_to(15, 1)),
    "a signal to all": Case(3, {**NAMED, **LONG, "name": "u"}, [STOPPED] * 3, signal_to(15, 0, 1, 2)),
    "rank 0 is killed": Case(3, {**NAMED, **LONG, "name": "v"}, [None, 2, 2], signal_to(9, 0)),
    "rank 1 is killed": Case(3, {**NAMED, **LONG, "name": "w"}, [2, None, 2], signal_to(9, 1)),
    "one that waits is killed": Case(3, {**NAMED, **LONG, "name": "x"}, [2, 2, None], signal_to(9, 2)),
    "one alone is killed": Case(2, {"plan": "single | dp3", **LONG, "name": "y"}, [None, 2], signal_to(9, 0)),
    "no data": Case(2, {"plan": "single | dp3", "data.path": "/none", "name": "z"}, [2, 2]),
}  # fmt: skip


def outcome(case: Case) -> dict:
    """Exit codes, output, the seconds that the end took, and processor time of the rank that used least."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's process has it
    words = [word for k, v in {**OPTIONS, **case.options}.items() for word in (f"--{k}", str(v))]
    pids = [fork_rank(index, case.world, store.port, words, Path.cwd()) for index in range(case.world)]
    end = time.monotonic() + 60
    if case.act:
        while not re.search(r"step +2/", Path("log-0").read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        case.act(pids)
        end = time.monotonic() + 60
    begin, codes, used = time.monotonic(), [None] * case.world, [0.0] * case.world
    while None in codes and time.monotonic() < end:
        pid, status, usage = os.wait3(os.WNOHANG)
        if pid:
            codes[pids.index(pid)] = os.waitstatus_to_exitcode(status)
            used[pids.index(pid)] = usage.ru_utime + usage.ru_stime
        time.sleep(0.01)
    seconds = time.monotonic() - begin
    for index, code in enumerate(codes):
        if code is None:
            os.kill(pids[index], signal.SIGKILL)
            os.waitpid(pids[index], 0)
    logs = [Path(f"log-{index}").read_text() for index in range(case.world)]
    del store
    return {"codes": codes, "logs": logs, "seconds": seconds, "used": used}


def drive(names: list[str]) -> None:
    """Run cases, and print a line of JSON for each."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in names:
        print(json.dumps({"name": name, **outcome(CASES[name])}), flush=True)


def found(folder: Path, *names: str) -> dict[str, dict]:
    done = run_program(["-m", "tests.promises.test_waiting_ranks", *names], folder, timeout=500)
    assert done.returncode == 0, done.stderr
    return {line.pop("name"): line for line in map(json.loads, done.stdout.splitlines())}


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_records(run / "metrics.jsonl") if "loss" in record]


def test_losses_are_those_of_one_process_whichever_plan_is_chosen(tmp_path):
    outcomes = found(tmp_path, "three of four", "four", "one", "three again", "alone")
    for name, case in outcomes.items():
        assert case["codes"] == CASES[name].codes, case["logs"]
    first, second, third, last, _ = [case["logs"][0] for case in outcomes.values()]
    assert "plan: dp2 (2nd of 3) on 2 processes: dp2\n1 of 3 processes waits: " in first
    assert "plan: dp4 (1st of 3) on 4 processes: dp4\n" in second and "wait" not in second
    assert "plan: single (3rd of 3) on 1 process: single\n" in third and "plan: dp2 (2nd of 3)" in last
    assert outcomes["three of four"]["logs"][2] == ""
    run, alone = tmp_path / "runs" / "gpt2_tiny-001", tmp_path / "runs" / "alone-001"
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5) and len(losses(run)) == STEPS
    assert json.loads((run / "recipe.json").read_text())["plan"] == CASES["three of four"].options["plan"]
    starts = [json.loads(file.read_text()) for file in sorted(run.glob("environment*.json"))]
    assert [(s["plan"], s["world"], s["waiting"]) for s in starts] == [
        ("dp2", 2, 1), ("dp4", 4, 0), ("single", 1, 0), ("dp2", 2, 1)
    ]  # fmt: skip
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.long
def test_whatever_ends_the_run_ends_those_that_wait(tmp_path):
    names = [name for name, case in CASES.items() if case.act or name in ("no data", "nobody waits")]
    for name, case in found(tmp_path, *names).items():
        codes = [
            None if wanted is None else code for wanted, code in zip(CASES[name].codes, case["codes"], strict=True)
        ]
        assert codes == CASES[name].codes, (name, case)
        assert case["seconds"] < 30, name
        assert all("Traceback" not in log for log in case["logs"]), (name, case)
        if case["codes"][0] == STOPPED:
            assert re.search(r"stopped at step \d+/100000; to go on", case["logs"][0])


if __name__ == "__main__":
    drive(sys.argv[1:])

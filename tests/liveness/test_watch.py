"""The watch over the processes of a run: whatever happens to one of them, all others end soon and say what it was."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from dtgpt.liveness import peers
from dtgpt.liveness import watch as module
from dtgpt.util.peers import Process

# A busy machine delays the heartbeats of so many processes; test_lost_peers.py is the short test.
pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
WORLD, VICTIM, LOST_AFTER, EVENT = 3, 1, 4.0, 25
BESIDE = 2  # cases that run at the same time
SECONDS = 20.0  # until a rank that nothing ends goes on to its normal end


def raise_error() -> None:
    raise ValueError("there is no more of it\nand a second line")


def send(number: int) -> None:
    os.kill(os.getpid(), number)


# What a rank does in its step EVENT; `owner` ends the process that has the store.
CASES = {
    "all end": {}, "killed": {VICTIM: lambda: send(signal.SIGKILL)}, "rank 0 killed": {0: lambda: send(signal.SIGKILL)},
    "suspended": {VICTIM: lambda: send(signal.SIGSTOP)}, "an error": {VICTIM: raise_error},
    "two killed": {0: lambda: send(signal.SIGKILL), 1: lambda: send(signal.SIGKILL)},
    "rank 0 had the store": {0: lambda: send(signal.SIGKILL)},
    "rank 0 had the store, which is noticed late": {0: lambda: send(signal.SIGKILL)}, "the store is gone": {},
    "no connections": {VICTIM: lambda: send(signal.SIGKILL)}, "waits for the end": {}, "an earlier start": {},
}  # fmt: skip


def run_rank(case: str, rank: int, port: int, log: Path) -> int:
    """Fork one rank, whose output goes to `log`; returns its id."""
    if child := os.fork():
        return child
    code = 99
    with suppress(BaseException):
        output = os.open(log, os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE=str("had the store" not in case),
        )  # fmt: skip
        try:
            code = body(case, rank)
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stdout.flush()
    os._exit(code)


def body(case: str, rank: int) -> int:
    peers.BEAT = peers.TICK = 0.2
    if case == "no connections":
        module.open_port = lambda: None
    if "late" in case:
        module.is_refused = lambda: not time.sleep(2)
    with module.watch_peers(Process.from_environment(), 20, LOST_AFTER) as watch:
        watch.remedy = lambda: "do this"
        if case == "waits for the end" and rank == 2:
            return watch.wait_for_end(lambda: False)
        begin = time.monotonic()
        ends = 2.0 if case in ("all end", "waits for the end", "an earlier start") else SECONDS
        while time.monotonic() < begin + ends:
            watch.step += 1
            if watch.step == EVENT and rank in CASES[case]:
                time.sleep(0.5)  # a heartbeat tells the step
                CASES[case][rank]()
            if watch.step == EVENT + 50 and "late" in case:  # a collective has failed
                watch.await_verdict(0.5)
                raise_error()
            time.sleep(0.02)
        if case == "waits for the end" and rank == 0:
            watch.end_run(7)
    return 0


def owner(case: str) -> tuple[int, int]:
    """Fork the process that has the store, in place of torchrun; returns its id and port."""
    reader, writer = os.pipe()
    if child := os.fork():
        return child, int(os.read(reader, 9))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if case == "an earlier start":  # left its keys, one of them without an end
        for rank in range(WORLD):
            store.set(f"dtgpt/hello/{rank}", "0" * 16)
    os.write(writer, str(store.port).encode())
    time.sleep(2.5 if case == "the store is gone" else 60)
    os._exit(0)


def drive(folder: Path, case: str) -> None:
    """Write for each rank its exit code, output and seconds until it ended."""
    port_of, begin = owner(case), time.monotonic()
    pid, port = port_of
    if "had the store" in case:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    ranks = {run_rank(case, rank, port, folder / f"{case}-{rank}"): rank for rank in range(WORLD)}
    found = {}
    while len(found) < WORLD - (case == "suspended") and time.monotonic() < begin + 40:
        ended, status = os.wait()
        if ended in ranks:
            rank, code = ranks.pop(ended), os.waitstatus_to_exitcode(status)
            text = (folder / f"{case}-{rank}").read_text()
            found[rank] = {"code": code, "seconds": time.monotonic() - begin, "text": text}
    for left in [*ranks, pid]:
        with suppress(OSError):
            os.kill(left, signal.SIGKILL)
    os.write(1, f"{json.dumps({'case': case, 'ranks': found})}\n".encode())  # at once: cases run side by side


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict[str, dict]]:
    command = [sys.executable, "-m", "tests.liveness.test_watch", str(tmp_path_factory.mktemp("watch"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return {found["case"]: found["ranks"] for found in map(json.loads, done.stdout.splitlines())}


def survivors(ranks: dict[str, dict], *lost: int) -> list[dict]:
    return [ranks[str(rank)] for rank in range(WORLD) if rank not in lost]


@pytest.mark.parametrize(("case", "lost", "words"), [
    ("killed", [1], "dtgpt: rank 1 on {host} (last step {step}) is lost: its process has ended; do this"),
    ("rank 0 killed", [0], "dtgpt: rank 0 on {host} (last step {step}) is lost: its process has ended; do this"),
    ("suspended", [1], "dtgpt: rank 1 on {host} (last step {step}) is lost: no sign of life for 4 s; do this"),
    ("no connections", [1], "(last step {step}) is lost: no sign of life for 4 s; do this"),
    ("an error", [1], "dtgpt: rank 1 on {host} (last step {step}) ended: there is no more of it; do this"),
    ("rank 0 had the store", [0], "dtgpt: rank 0 (last step "),
    ("rank 0 had the store, which is noticed late", [0], "dtgpt: rank 0 (last step "),
])  # fmt: skip
def test_when_a_process_is_lost_the_others_end_and_name_it(outcomes, case, lost, words):
    for found in survivors(outcomes[case], *lost):
        words = words.format(host=os.uname().nodename, step=EVENT)
        assert found["code"] == 2 and words in found["text"], found
        assert "Traceback" not in found["text"] and found["seconds"] < SECONDS, found


def test_the_last_of_three_ends_too(outcomes):
    (found,) = survivors(outcomes["two killed"], 0, 1)
    assert found["code"] == 2 and "is lost: its process has ended" in found["text"], found


def test_without_the_store_all_end(outcomes):
    for found in survivors(outcomes["the store is gone"]):
        assert found["code"] == 2 and "has not reached the store of the run at 127.0.0.1:" in found["text"], found


def test_a_normal_end_is_no_loss_and_keys_of_an_earlier_start_do_not_count(outcomes):
    for case in ("all end", "an earlier start"):
        for found in survivors(outcomes[case]):
            assert (found["code"], found["text"]) == (0, ""), (case, found)


def test_a_process_that_waits_learns_the_exit_code_of_the_run(outcomes):
    codes = [found["code"] for found in survivors(outcomes["waits for the end"])]
    assert codes == [0, 0, 7], outcomes["waits for the end"]


if __name__ == "__main__":
    running = 0
    for name in CASES:
        if running == BESIDE:
            os.wait()
            running -= 1
        if not os.fork():
            drive(Path(sys.argv[1]), name)
            os._exit(0)
        running += 1
    while running:
        os.wait()
        running -= 1

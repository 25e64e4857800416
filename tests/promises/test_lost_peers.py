"""A process that dies at any point from the meeting of the ranks on: the others end in one sentence."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.forked_ranks import fork_rank
from tests.support.ports import held_port
from tests.support.programs import run_program

pytestmark = pytest.mark.slow(12)

ROOT = Path(__file__).parents[2]
TIMEOUT = 6  # seconds, of the run; a loaded machine sees a dead process late
BESIDE = 3  # cases at a time, which mostly wait
# What a rank is in when it dies, and which ranks do.
POINTS = {
    "the agreement": ("dtgpt.parallel.launch.code_digests", (0, 1)),
    "making the mesh": ("dtgpt.parallel.mesh.init_device_mesh", (0,)),
    "verifying the checkpoint": ("dtgpt.checkpoint.manifest.Checkpoint.problem", (0, 1)),
    "reading the data": ("dtgpt.train.setup.read_dataset", (1,)),
    "building the model": ("dtgpt.train.trainer.build_stages", (0,)),
    "loading the checkpoint": ("dtgpt.train.checkpoints.load_training", (1,)),
    "the first step": ("dtgpt.train.trainer.Trainer.train_step", (0, 1)),
    "the second step": ("dtgpt.optim.update.Update.apply", (0,)),
}


def die(*_, **__):
    time.sleep(0.5)  # the other one has come to the same point
    os.kill(os.getpid(), signal.SIGKILL)


def begin_to_meet_and_die(*_, **__):
    """Rank 0 opens the place where all meet, then dies."""
    import torch.distributed as dist

    dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=True, wait_for_workers=False)
    time.sleep(1)
    die()


def hang(*_, **__):
    time.sleep(600)


# By name: what each rank calls in place of a function; a rank that is None never starts.
CASES = {f"rank {r} dies in {what}": {r: (point, die)} for what, (point, ranks) in POINTS.items() for r in ranks}
CASES["rank 0 never starts"] = {0: None}
CASES["rank 1 never starts"] = {1: None}
CASES["rank 0 dies before the others join"] = {0: ("dtgpt.liveness.watch.meet", begin_to_meet_and_die)}
CASES["rank 0 never comes to torchrun's store"] = {0: None}
CASES["rank 1 dies in the first step of a pipeline"] = CASES["rank 1 dies in the first step"]
CASES["rank 1 dies in the first step of zero3"] = CASES["rank 1 dies in the first step"]
CASES["rank 1 hangs"] = {1: ("dtgpt.train.trainer.Trainer.train_step", hang)}


def outcome(folder: Path, words: list[str], case: dict, port: int) -> dict:
    """Exit codes and outputs of the ranks that did not die of the case, and the seconds until all have ended. port: of
    their store."""
    store = "torchrun" in str(folder)
    if store:
        import torch.distributed as dist

        kept = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # noqa: F841
    begin = time.monotonic()
    started = [i for i in range(2) if case.get(i, ()) is not None]
    pids = {i: fork_rank(i, 2, port, words, folder, store, case.get(i)) for i in started}
    codes = {}
    awaited = set(pids) - ({1} if "rank 1 hangs" in str(folder) else set())  # it ends, too, when rank 0 has given up
    while not awaited <= set(codes):
        pid, status = os.wait()
        index = next(i for i, theirs in pids.items() if theirs == pid)
        codes[index] = os.waitstatus_to_exitcode(status)
        if time.monotonic() - begin > 60:
            break
    seconds = time.monotonic() - begin
    for index in set(pids) - set(codes):
        os.kill(pids[index], signal.SIGKILL)
        os.waitpid(pids[index], 0)
    return {i: {"code": codes[i], "out": (folder / f"log-{i}").read_text()} for i in codes if i not in case} | {
        "seconds": seconds
    }


def drive(root: Path) -> None:
    """All cases, a line of JSON for each."""
    options = {
        "data.tokenizer": "bytes", "data.held_out": 0.0, "model.num_layers": 2, "model.hidden_size": 16,
        "model.num_heads": 2, "model.seq_length": 16, "device": "cpu", "steps": 4, "global_batch_size": 2,
        "micro_batch_size": 1, "log.sample_tokens": 0, "log.eval_interval": 0, "checkpoint.interval": 0,
        "plan": "tp2", "timeout": TIMEOUT,
    }  # fmt: skip
    words = [w for k, v in options.items() for w in (f"--{k}", str(v))]
    first = root / "first"
    first.mkdir()
    with held_port() as port:  # nobody dies, on a loaded machine either
        outcome(first, [*words, "--steps", "1", "--timeout", "60"], {}, port)
    running = 0
    for number, (name, case) in enumerate(CASES.items()):
        if running == BESIDE:
            os.wait()
            running -= 1
        running += 1
        if os.fork():
            continue
        folder = root / f"{number} {name}"
        folder.mkdir()
        shutil.copytree(first / "runs", folder / "runs")
        more = ["--resume", "auto"] if "checkpoint" in name else []
        more += ["--plan", "pp2"] if "pipeline" in name else ["--plan", "zero3"] if "zero3" in name else []
        with held_port() as port:
            line = json.dumps({"name": name, **outcome(folder, [*words, *more], case, port)})
        os.write(1, f"{line}\n".encode())  # at once: cases run side by side
        os._exit(0)
    for _ in range(running):
        os.wait()


def test_the_death_of_a_rank_is_one_sentence_wherever_it_happens(tmp_path):
    done = run_program(["-m", "tests.promises.test_lost_peers", tmp_path], ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    found = {line.pop("name"): line for line in map(json.loads, done.stdout.splitlines())}
    assert found.keys() == CASES.keys()
    for name, line in found.items():
        seconds = line.pop("seconds")
        ((_, left),) = line.items()
        assert left["code"] == 2 and "Traceback" not in left["out"], name + left["out"]
        assert "frame #" not in left["out"] and "[c10d]" not in left["out"], name + left["out"]
        last = left["out"].splitlines()[-1]
        if "starts" in name or "comes" in name or "join" in name:
            words = ["the processes did not find each other"]
        elif "hangs" in name:
            words = [f"another process of the run did not answer within timeout={TIMEOUT} s"]
        else:
            words = [f"rank {name[5]} ", "is lost: its process has ended; start the run again"]
        assert last.startswith("dtgpt: ") and all(word in last for word in words), name + left["out"]
        assert seconds < 2 * TIMEOUT + 5, name


if __name__ == "__main__":
    import dtgpt.cli

    dtgpt.cli.RANK_0_FIRST = 0
    sys.stdout.reconfigure(line_buffering=True)
    drive(Path(sys.argv[1]))

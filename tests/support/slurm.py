"""What sbatch files use of Slurm, over nodes of `tests/support/nodes.py`: scripts called `srun` and `scontrol` on the
first node, which ask this process to act, and the requeue of jobs. No Slurm is needed."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from tests.support.nodes import Node, Nodes

JOB = "17"
POLL = 0.05  # seconds
# A call leaves its words and its environment in a folder, and waits for the exit code.
CALL = """#!/bin/bash
call=$(mktemp -d "$FAKE_SLURM/calls/XXXXXXXX")
{ printf '%s\\0' "${0##*/}" "$@"; } > "$call/words"
env -0 > "$call/environment"
: > "$call/ready"
while [[ ! -e $call/code ]]; do sleep 0.05; done
cat "$call/output"
exit "$(cat "$call/code")"
"""
OWN = ("SLURM_", "DTGPT_", "TORCH_", "STEP_", "PYTHON", "head_node", "runs")  # what srun hands on, of the environment


class Slurm:
    """A controller with one job, `job`; a context that ends it."""

    def __init__(self, nodes: Nodes, per_node: int = 1, **environment: str):
        self.nodes, self.folder = nodes, nodes.shared / "slurm"
        (self.folder / "calls").mkdir(parents=True)
        bin = self.folder / "bin"
        bin.mkdir()
        for name in ("srun", "scontrol"):
            (bin / name).write_text(CALL)
            (bin / name).chmod((bin / name).stat().st_mode | stat.S_IXUSR)
        path = f"{bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        names = ",".join(node.name for node in nodes)
        self.environment = environment | {
            "PATH": path, "FAKE_SLURM": str(self.folder), "SLURM_JOB_ID": JOB, "SLURM_CPUS_PER_TASK": "1",
            "SLURM_NNODES": str(len(nodes.nodes)), "SLURM_JOB_NODELIST": names, "SLURM_GPUS_ON_NODE": str(per_node),
        }  # fmt: skip
        self.starts = self.requeued = 0
        self._batch: subprocess.Popen | None = None
        self._tasks: list[tuple[Node, subprocess.Popen, Path]] = []
        self._ended = False
        self._words: list[str] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()

    def sbatch(self, *words: str | Path) -> None:
        """Start the job: a script and its arguments."""
        self._words = [str(word) for word in words]
        self._start()

    def _start(self) -> None:
        self.starts += 1
        self._batch = self.nodes[0].start("bash", *self._words, cwd=self.nodes.shared, **self.environment)

    def wait_until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Wait until `condition()` is true. Raises TimeoutError after so many seconds, and where the job has ended."""
        nodes = self.nodes
        nodes.wait_until(lambda: self._batch.poll() is not None or condition(), seconds, what)
        if not condition():
            raise TimeoutError(f"{what}: the job ended before\n{nodes.outputs()}")

    def wait(self, seconds: float) -> int:
        """Return the exit code of the job, after all of its requeues."""
        self.nodes.wait_until(lambda: self._batch.poll() is not None and not self.requeued, seconds, "the job's end")
        return self._batch.returncode

    def signal_tasks(self, number: int = signal.SIGTERM) -> None:
        """Signal the process that srun started on each node, as at the end of the time and at a preemption."""
        for _, command, _ in self._tasks:
            children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
            for child in children:
                os.kill(int(child), number)

    def lose(self, node: Node) -> None:
        """End a node: Slurm ends the job and requeues it; the node is back at once."""
        for other in self.nodes:
            if other is node:
                other.kill()
            else:
                for _, command, _ in [task for task in self._tasks if task[0] is other]:
                    end_children(command)
        if node is not self.nodes[0]:
            end_children(self._batch)
        node.boot()
        self.requeued += 1  # only now: the other thread starts the job again

    def _serve(self) -> None:
        """Answer calls, and start a job again that was requeued."""
        while not self._ended:
            for ready in sorted((self.folder / "calls").glob("*/ready")):
                ready.unlink()
                words = (ready.parent / "words").read_text().split("\0")[:-1]
                self._srun(words, ready.parent) if words[0] == "srun" else self._scontrol(words, ready.parent)
            running = []
            for node, command, call in self._tasks:
                (running.append((node, command, call)) if command.poll() is None else self._note(command, call))
            self._tasks = running
            if self.requeued and self._batch.poll() is not None and not self._tasks:
                self._start()
                self.requeued -= 1
            time.sleep(POLL)

    def _srun(self, words: list[str], call: Path) -> None:
        command = words[next(i for i, word in enumerate(words) if i and not word.startswith("-")) :]
        lines = (call / "environment").read_text().split("\0")[:-1]
        given = dict(line.split("=", 1) for line in lines)
        handed = {name: value for name, value in given.items() if name.startswith(OWN)} | {"PATH": given["PATH"]}
        (call / "codes").write_text(json.dumps([]))
        for node in self.nodes:
            task = node.start(*command, cwd=self.nodes.shared, **handed)
            self._tasks.append((node, task, call))

    def _note(self, command: subprocess.Popen, call: Path) -> None:
        """Answer srun with the highest exit code, once all of its tasks have ended."""
        code = command.returncode if command.returncode >= 0 else 128 - command.returncode
        codes = [*json.loads((call / "codes").read_text()), code]
        (call / "codes").write_text(json.dumps(codes))
        if len(codes) == len(self.nodes.nodes):
            answer(call, max(codes))

    def _scontrol(self, words: list[str], call: Path) -> None:
        if words[1:3] == ["show", "hostnames"]:
            answer(call, 0, words[3].replace(",", "\n") + "\n")
        elif words[1:] == ["requeue", JOB]:
            self.requeued += 1
            answer(call, 0)
        else:
            answer(call, 1, f"unknown call: {words}\n")


def answer(call: Path, code: int, output: str = "") -> None:
    (call / "output").write_text(output)
    (call / "code.new").write_text(str(code))
    (call / "code.new").rename(call / "code")


def end_children(command: subprocess.Popen) -> None:
    """End what runs on a node for the command of `Node.start`, whose own process is outside of the node."""
    pids = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    for pid in pids:
        end_tree(int(pid))


def end_tree(pid: int) -> None:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in children:
        end_tree(int(child))

"""Processes that a command starts to run a plan."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from dtgpt.compare.fuzz.pool import Pool, PoolJob
from dtgpt.util.console import say_error
from dtgpt.util.peers import VARIABLES
from dtgpt.util.shared.environment import child_environment


def run_workers(world: int, words: list[str], more: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """Run `dtgpt WORDS` in `world` processes, and wait for them. Return None where all went well; else the sentence of
    the process that failed, "" where none said one and all that they printed was shown. more: environment variables."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    # Without what torchrun may have told this process of itself.
    environment = {k: v for k, v in child_environment().items() if k not in VARIABLES.values()} | dict(more)
    environment.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, *launcher, "-m", "dtgpt", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    if not done.returncode:
        return None
    output = done.stdout + done.stderr
    sentence = next((line for line in output.splitlines() if line.startswith("dtgpt: ")), None)
    if sentence is None:
        say_error(output[-5000:])
        return ""
    return sentence.removeprefix("dtgpt: ")


LONG = 1e6  # seconds; a process that waits for others for too long ends by itself


def run_in_pool(
    pool: Pool, world: int, work: Callable[..., Any], arguments: tuple[Any, ...], patience: float
) -> str | None:
    """Run `work(*arguments)` in `world` processes of the pool, and return as `run_workers` does. patience: seconds that
    a collective may wait."""
    (answers,) = pool.run([PoolJob(world, work, arguments)], LONG, patience)
    pool.renew()
    failures = [answer for answer in answers if answer.failure]
    if failures:
        first = min(failures, key=lambda answer: answer.when)
        say_error(first.output[-5000:] or first.failure)
        return ""
    return next((answer.refusal for answer in answers if answer.refusal), None)

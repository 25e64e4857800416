"""Processes that a command starts to run a plan."""

import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType

from dtgpt.util.console import say_error
from dtgpt.util.hardware import child_environment
from dtgpt.util.peers import VARIABLES


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

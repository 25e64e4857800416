"""Processes that stay alive between cases, or runs of a comparison on GPUs, since a start of Python and PyTorch takes
longer than a small case.

On CPUs each job gets a process group of its own, which ends with it, so that nothing of a job can reach the next one.
On GPUs a group lives as long as its processes, and each number of processes has processes of its own: a process that
began a second group through NCCL after the end of its first died of a segmentation fault (torch 2.11). After a failure
the processes of the job are ended and started again: they may wait for each other for ever.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dtgpt.compare.torch_private import forget_meshes
from dtgpt.config.execution import choose_device
from dtgpt.parallel.launch import end_process_group, start_process_group
from dtgpt.util.errors import UserError
from dtgpt.util.peers import VARIABLES

# Imported once by the process from which the others are forked; none of them starts a thread.
IMPORTS = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "dtgpt.compare.fuzz.measure",
]
COLLECT = 0.5  # seconds to wait for what other ranks say after the first failure
SHOWN = 4  # functions of a process that crashed
STACKS = 0.5  # seconds to wait for the stacks of processes that hang
OUTPUT = 6000  # characters of a process's output
LEAVE = 20.0  # seconds in which a process group must end
MOST_JOBS = 100  # of processes on GPUs, which keep the communicators of all meshes
LATE = 60.0  # seconds after the parent's timeout at which collectives fail, too


class ProcessResult(NamedTuple):
    """What one process says of its work."""

    value: Any = None
    refusal: str = ""  # the sentence of a UserError
    failure: str = ""  # the last line of any other exception, and where it was raised
    kind: str = ""  # the exception's type
    when: float = 0.0  # of an exception, on the clock that processes share; 0 of a death, which explains others
    rank: int = 0
    output: str = ""  # the end of what a process that failed has printed, with tracebacks


class Key(NamedTuple):
    """Which of a pool's processes."""

    place: int  # of its job among those that run side by side
    world: int | None  # of its jobs; None: any
    rank: int


class PoolJob(NamedTuple):
    """Work for `world` processes: `function(*arguments)` in each of them, which must be importable by name."""

    world: int
    function: Callable[..., Any]
    arguments: tuple


class Pool:
    """Processes for jobs that run side by side. device: auto, cpu or cuda, as in a recipe. imports: modules to import
    before processes are forked. keep: whether `renew` keeps processes on GPUs, whose start takes seconds."""

    def __init__(self, device: str, imports: Sequence[str] = IMPORTS, *, keep: bool = True):
        self.device = device
        self._on_gpus = on_gpus = choose_device(device).type == "cuda"
        self._keeps = keep and on_gpus
        # A process that has asked for CUDA devices cannot be forked.
        self._context: Any = multiprocessing.get_context("spawn" if on_gpus else "forkserver")
        if not on_gpus:
            self._context.set_forkserver_preload(list(imports))
        self._folder = tempfile.TemporaryDirectory(prefix="dtgpt-ranks-", ignore_cleanup_errors=True)
        self._ranks: dict[Key, Worker] = {}
        self._jobs: Counter[Key] = Counter()  # that a process has begun

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        self._end(list(self._ranks))
        self._folder.cleanup()

    def expect(self, worlds: Sequence[int]) -> None:
        """Start the processes of jobs to come, one after the other, of so many processes. On GPUs alone, where a start
        takes seconds, in which others may work."""
        for key in (key for world in worlds for key in self._keys(0, world) if self._keeps):
            self._start(key)

    def renew(self) -> None:
        """Give the jobs to come new processes, unless those on GPUs are kept: all of them are as at a start."""
        if not self._keeps:
            self._end(list(self._ranks))

    def run(self, jobs: Sequence[PoolJob], timeout: float, patience: float | None = None) -> list[list[ProcessResult]]:
        """Run the jobs at the same time and return for each what its ranks answered. Ranks that do not answer within
        `timeout` seconds have failures of the kind "hangs"; after another failure or a refusal they are left out.
        patience: seconds that a collective may wait; None: a little more than the timeout."""
        try:
            for place, job in enumerate(jobs):
                self._begin(place, job, timeout + LATE if patience is None else patience)
            deadline, results = time.monotonic() + timeout, []
            for place, job in enumerate(jobs):
                results.append(self._collect(self._keys(place, job.world), deadline, timeout))
            return results
        except BaseException:  # Ctrl-C too: a rank in the middle of a job is of no use to the next one
            self._end(list(self._ranks))
            raise

    def _keys(self, place: int, world: int) -> list[Key]:
        """Return which processes do a job, by rank."""
        return [Key(place, world if self._on_gpus else None, rank) for rank in range(world)]

    def _start(self, key: Key) -> None:
        """Start a process, unless it is there."""
        if key not in self._ranks:
            self._ranks[key] = Worker(self._context, f"{self._folder.name}/{'-'.join(map(str, key))}.log")

    def _begin(self, place: int, job: PoolJob, patience: float) -> None:
        store, keys = f"{self._folder.name}/store-{time.monotonic_ns()}", self._keys(place, job.world)
        if self._on_gpus and any(self._jobs[key] >= MOST_JOBS for key in keys):
            self._end([key for key in keys if key in self._ranks])
        for key in keys:
            self._start(key)
            self._jobs[key] += 1
            message = job.function, job.arguments, key.rank, job.world, store, patience, self.device
            self._ranks[key].send(message)

    def _collect(self, keys: list[Key], deadline: float, timeout: float) -> list[ProcessResult]:
        answers: dict[Key, ProcessResult] = {}
        self._gather(keys, deadline, answers)
        fine = len(answers) == len(keys) and not any(a.failure for a in answers.values())
        if fine:
            for key in keys:  # no rank leaves the group before all have answered
                self._ranks[key].send("leave")
            left: dict[Key, ProcessResult] = {}
            self._gather(keys, time.monotonic() + LEAVE, left)
            fine = len(left) == len(keys) and not any(a.failure for a in left.values())
        missing = [key for key in keys if key not in answers]
        if missing and not any(answer.failure or answer.refusal for answer in answers.values()):
            for key in missing:
                self._ranks[key].print_stacks()
            time.sleep(STACKS)
            answers |= dict.fromkeys(missing, ProcessResult(failure=f"no answer within {timeout:g} s", kind="hangs"))
        for key, answer in answers.items():
            answers[key] = answer._replace(rank=key.rank, output=self._ranks[key].output() if answer.failure else "")
        if not fine:
            self._end(keys)
        return [answers[key] for key in keys if key in answers]

    def _gather(self, keys: list[Key], deadline: float, answers: dict[Key, ProcessResult]) -> None:
        waiting = {self._ranks[key].connection: key for key in keys}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                key = waiting.pop(connection)  # type: ignore[arg-type]
                answers[key] = answer = self._ranks[key].receive()
                if answer.failure or answer.refusal:
                    deadline = min(deadline, time.monotonic() + COLLECT)

    def _end(self, keys: list[Key]) -> None:
        for key in keys:
            self._ranks.pop(key).end()
            del self._jobs[key]


class Worker:
    """The parent's end of a process that runs `serve`; messages both ways are pickled."""

    def __init__(self, context: Any, log: str):
        self._log = log
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, log), daemon=True)
        self.process.start()
        theirs.close()  # else its death would not close the connection

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it has just died: `receive` says so
            self.connection.send_bytes(pickle.dumps(message))  # Connection.send would share the memory of tensors

    def receive(self) -> ProcessResult:
        """Return the next answer of the process; a failure that names its exit code where it has died."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(5)
            code, where = self.process.exitcode, crash_site(Path(self._log))
            died = f"a process died with exit code {code}" + (f" in {where}" if where else "")
            return ProcessResult(failure=died, kind=f"exit code {code}")

    def print_stacks(self) -> None:
        """Let the process print the stacks of its threads."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGQUIT)

    def output(self) -> str:
        """Return the end of what the process has printed in its last job."""
        return Path(self._log).read_text(errors="replace").strip()[-OUTPUT:]

    def end(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.connection.close()


def crash_site(log: Path) -> str:
    """Return the innermost functions of the thread that crashed, as `faulthandler` wrote them; empty where it did
    not."""
    text = log.read_text(errors="replace") if log.exists() else ""
    _, _, stack = text.partition("Current thread ")
    calls = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\S+)', stack.partition("\n\n")[0])
    return " < ".join(f"{name} ({file}:{line})" for file, line, name in calls[:SHOWN])


def serve(connection: Any, log: str) -> None:
    """Work as a rank: do one job after the other until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)  # append: each job truncates
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(2)
    faulthandler.register(signal.SIGQUIT, 2)
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            body = connection.recv_bytes()
            os.ftruncate(output, 0)
            connection.send_bytes(_attempt(_work, body))
            connection.recv_bytes()
            connection.send_bytes(_attempt(_leave))


def _attempt(function: Callable, *arguments: Any) -> bytes:
    try:
        return pickle.dumps(ProcessResult(function(*arguments)))
    except UserError as error:
        return pickle.dumps(ProcessResult(refusal=str(error)))
    except BaseException as error:
        traceback.print_exc()
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames[1:] if "dtgpt" in Path(frame.filename).parts and frame.filename != __file__]
        frame = (own or frames)[-1]
        where = f" ({Path(frame.filename).name}:{frame.lineno})"
        said = traceback.format_exception_only(error)[-1].strip().splitlines()[0][:300]
        return pickle.dumps(ProcessResult(failure=f"{said}{where}", kind=type(error).__name__, when=time.monotonic()))


def _work(body: bytes) -> Any:
    function, arguments, rank, world, store, patience, device = pickle.loads(body)
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    values = {"rank": rank, "world": world, "local_rank": rank, "local_world": world}
    os.environ.update({VARIABLES[name]: str(value) for name, value in values.items()})
    if world > 1 and not dist.is_initialized():
        where = choose_device(device, rank)
        start_process_group(where, patience, store=dist.FileStore(store, world), rank=rank, world_size=world)
    return function(*arguments)


def _leave() -> None:
    if dist.is_initialized() and dist.get_backend() != "nccl":
        end_process_group()
    # What was not imported has nothing to forget, and takes seconds to import.
    if "torch.distributed.tensor" in sys.modules:
        forget_meshes()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()

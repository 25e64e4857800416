"""Programs that begin at once: forks of a process that has imported torch already. Used by tests only.

A start of Python, torch and torchrun takes 4 to 11 s of processor time, a fork 0.5 s. What a program does is the same
from its first line on; tests of what comes before it (the interpreter, an interrupted import) start a real one.
"""

import atexit
import contextlib
import importlib
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from dtgpt.compare.fuzz.pool import IMPORTS
from tests.support.pictures import no_pictures
from tests.support.ranks import PRELOADED

TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
OWN_LAUNCHER = "dtgpt.liveness.launcher"
SIGNALS = "dtgpt.run.stops.signals"
CALLER = "torch.distributed.elastic.rendezvous.dynamic_rendezvous.get_method_name"
POPEN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler.Popen"


class Program:
    """`python WORDS`, with the methods of subprocess.Popen that tests use.

    words: a file, `-m` and a module, or `-c` and code, then arguments. `torchrun`'s processes are forks of it in turn.
    """

    def __init__(
        self, words: Sequence, cwd: str | Path, env: dict[str, str] | None = None, start_new_session: bool = False
    ) -> None:
        self.args = [str(word) for word in words]
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        (out, their_out), (err, their_err) = (context.Pipe(duplex=False) for _ in range(2))
        environment = dict(os.environ if env is None else env)
        self._process = context.Process(
            target=begin, args=(self.args, str(cwd), environment, their_out, their_err, start_new_session)
        )
        self._process.start()
        atexit.register(self.kill)  # multiprocessing, which registered before, joins what still runs
        their_out.close()
        their_err.close()
        self.pid: int = self._process.pid
        self.stdout, self.stderr = text_of(out), text_of(err)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return the rest of stdout and stderr; raises TimeoutExpired when the program has not ended by then."""
        texts = ["", ""]

        def read(index: int, stream: io.TextIOWrapper) -> None:
            texts[index] = stream.read()

        readers = [threading.Thread(target=read, args=(i, s)) for i, s in enumerate((self.stdout, self.stderr))]
        for reader in readers:
            reader.start()
        try:
            self.wait(timeout)
        finally:
            if self.poll() is None:
                self.kill()
            for reader in readers:
                reader.join(10)
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def text_of(end: Any) -> io.TextIOWrapper:
    """Return the reading end of a pipe as a file."""
    with end:
        return os.fdopen(os.dup(end.fileno()), encoding="utf-8", errors="replace")


def run_program(
    words: Sequence, cwd: str | Path, env: dict[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess:
    """Return the ended program with its exit code, stdout and stderr, as subprocess.run does."""
    program = Program(words, cwd, env)
    out, err = program.communicate(timeout)
    assert program.returncode is not None
    return subprocess.CompletedProcess(program.args, program.returncode, out, err)


def begin(words: list[str], cwd: str, environment: dict[str, str], out: Any, err: Any, new_session: bool) -> None:
    """Become the program; never returns."""
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close()
    err.close()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.chdir(cwd)
    become(words, environment, new_session)


def become(words: list[str], environment: dict[str, str], new_session: bool) -> None:
    """Run the program in this process, with the streams and the folder that it has; never returns."""
    code = 1
    try:
        if new_session:
            os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        sys.stdout = sys.__stdout__ = stream_to(1, "strict", not environment.get("PYTHONUNBUFFERED"))
        sys.stderr = sys.__stderr__ = stream_to(2, "backslashreplace", buffered=False)
        if find_spec(SIGNALS) is not None:  # deleted, see tests/support/deleted.py
            importlib.import_module(
                SIGNALS
            ).LAUNCHER = os.getppid()  # which the program finds when it imports this module
        # For a name, torchrun reads the sources of all that is on the stack, twice.
        caller = mock.patch(CALLER, lambda depth=2: sys._getframe(depth).f_code.co_name)
        with no_pictures(), mock.patch(POPEN, Fork), own_launcher_forks(), caller:
            code = run(words)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def own_launcher_forks() -> contextlib.AbstractContextManager:
    """Return a context in which `dtgpt train --nproc` forks."""
    if find_spec(OWN_LAUNCHER) is None:  # deleted, see tests/support/deleted.py
        return contextlib.nullcontext()
    return mock.patch(f"{OWN_LAUNCHER}.Popen", Fork)


def stream_to(number: int, errors: str, buffered: bool) -> io.TextIOWrapper:
    """Return a standard stream as the interpreter opens it."""
    binary: Any = os.fdopen(number, "wb", buffering=-1 if buffered else 0, closefd=False)
    return io.TextIOWrapper(binary, "utf-8", errors, write_through=not buffered)


def run(words: list[str]) -> int:
    """Return the exit code."""
    first, *rest = words
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    try:
        if first == "-m":
            sys.argv, sys.path[:0] = rest, [os.getcwd(), *path]
            sys.modules.pop(rest[0], None)  # preloaded, of which runpy would warn
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv, sys.path[:0] = ["-c", *rest[1:]], ["", *path]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        else:
            sys.argv, sys.path[:0] = words, [str(Path(first).resolve().parent), *path]
            runpy.run_path(first, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    threads = [t for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
    for thread in threads:
        thread.join()
    return 0


def forget_launcher() -> None:
    """Drop what torchrun has registered in this process, as an exec would."""
    atexit._clear()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


class Fork:
    """Stands in for the Popen by which torchrun and `dtgpt train --nproc` start `python WORDS`."""

    def __init__(
        self, args: Sequence[str], env: dict[str, str], stdout: Any = None, stderr: Any = None,
        start_new_session: bool = False,
    ) -> None:  # fmt: skip
        self.args = args
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for stream, number in ((stdout, 1), (stderr, 2)):
                if stream is not None:
                    os.dup2(stream.fileno(), number)
            forget_launcher()
            words = [word for word in args[1:] if word != "-u"]
            become(words, env | {"PYTHONUNBUFFERED": "1"}, start_new_session)

    def poll(self) -> int | None:
        return self._collect(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        if timeout is None:
            return self._collect(0)
        end = threading.Event()
        for _ in range(int(timeout / 0.02) + 1):
            if self.poll() is not None:
                break
            end.wait(0.02)
        else:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _collect(self, how: int) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, how)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


if __name__ == "__main__":  # `python -m tests.support.programs WORDS`: a start whose torchrun forks its processes
    for name in (*IMPORTS, "torch.distributed.run", "dtgpt.cli", "dtgpt.train.loop"):
        importlib.import_module(name)
    become(sys.argv[1:], dict(os.environ), new_session=False)

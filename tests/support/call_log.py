"""Write down, while tests run, which function each test calls, in every process that it starts.

Imports the standard library only: a copy of this file in PYTHONPATH starts it with each Python process, before torch.
What is written is small and unbuffered, since pools end their processes with SIGKILL: pairs of 32 bits, the number of
the test and a checksum of what it used, and for each checksum once its words. A process that may not let files grow,
as that of chat templates, writes to mapped ones of a fixed length.
"""

import mmap
import os
import resource
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2]) + os.sep
write = os.write  # tests replace that of the module
SKIPPED = (".git", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache", "build", "runs")  # not sources
FOREIGN = -1
VAIN = 20_000  # lines that a function may run in a process without a new one: then the test does not follow it
AGAIN = 1_000  # and each later test so many
SPARE = 1 << 20  # bytes of a mapped file
IMPORT = 1 << 31  # in place of a test's number: the import of the file with this checksum
MONITORING = getattr(sys, "monitoring", None)  # of Python 3.12 and later: other packages' functions are seen once
TOOL = 4  # of the numbers that Python gives no use
# These open sources to compile them, to see whether they are archives, or to show lines of a traceback.
READERS = ("importlib", "zipimport", "linecache", "tokenize", "_pytest")


def checksum(words: str) -> int:
    return zlib.crc32(words.encode())


def import_number(file: str) -> int:
    """Return what stands in place of a test's number for calls while a file is imported."""
    return IMPORT | (checksum(f"import {file}") & (IMPORT - 1))


@contextmanager
def above_streams() -> Iterator[None]:
    """Return a context in which files get other numbers than those of the standard streams, also where these are
    closed: else, what the program prints would get into the files."""
    held = [os.open(os.devnull, os.O_RDONLY)]
    while held[-1] <= 2:
        held.append(os.open(os.devnull, os.O_RDONLY))
    try:
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)


class CallLog:
    """What one pytest worker and all of its descendants write to the files of a folder."""

    def __init__(self, folder: str, with_lines: bool = False):
        self.folder = folder
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        names = ("pairs", "words", "lines") if with_lines else ("pairs", "words")
        with above_streams():
            self._files = {name: os.open(f"{folder}/{name}", flags) for name in names}
            descriptor = os.open(f"{folder}/number", os.O_CREAT | os.O_RDWR)
            os.ftruncate(descriptor, 4)
            self._number = memoryview(mmap.mmap(descriptor, 4)).cast("I")  # shared: forks see the next test begin
            os.close(descriptor)
        self._spare: dict[str, mmap.mmap] = {}  # in place of the files, while these may not grow
        self._owner = 0  # the process that has made them
        self._is_limited = False
        self._last: dict[int, int] = {}  # by id of a code object: the number under which it was written last
        self._kept: list[CodeType] = []  # else another object could get the id
        self._known: set[int] = set()
        self._imports: list[tuple[int, int]] = []  # thread, number
        self._missing: dict[int, set[int]] = {}  # by id of a code object: its lines that have not run yet
        self._vain: dict[int, int] = {}  # and how many ran since the last new one
        self._left: set[int] = set()  # those that are not followed up to the next test

    def follow(self) -> None:
        """Note calls of this thread, and those to come, from now on. A trace function is needed for lines, and before
        Python 3.12: up to an error in it, as where no call may be nested deeper, which ends it."""
        if MONITORING is None or "lines" in self._files:
            threading.settrace(self.trace)
            sys.settrace(self.trace)
        elif MONITORING.get_tool(TOOL) is None:
            events = MONITORING.events
            MONITORING.use_tool_id(TOOL, "dtgpt's calls of tests")
            MONITORING.register_callback(TOOL, events.PY_START, self._start)
            MONITORING.register_callback(TOOL, events.PY_RETURN, self._end_import)
            MONITORING.register_callback(TOOL, events.PY_UNWIND, self._end_import)
            MONITORING.set_events(TOOL, events.PY_START | events.PY_UNWIND)

    def begin(self, number: int) -> None:
        """Let what is called from now on belong to a test, or 0: to none."""
        self._number[0] = number

    def _current(self) -> int:
        """Return the number of the test, or of the import that this thread is in."""
        if self._imports and self._imports[-1][0] == threading.get_ident():
            return self._imports[-1][1]
        return self._number[0]

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """Note the call of a function; the trace function of Python, which asks for no lines."""
        code = frame.f_code
        last = self._last.get(id(code))
        if last == FOREIGN:  # nearly all calls, which no test is to wait for
            return None
        number = self._current()
        if last == number or ROOT is None:  # None: the interpreter ends
            return self._follow if id(code) not in self._left and self._missing.get(id(code)) else None
        own = code.co_filename.startswith(ROOT)
        if last is None:
            self._kept.append(code)
        self._last[id(code)] = number if own else FOREIGN
        if own:
            file = code.co_filename[len(ROOT) :]
            if code.co_name != "<module>":
                self.note(number, f"{file}:{code.co_qualname.partition('.<locals>')[0]}")
                if "lines" in self._files and file.startswith("dtgpt/"):
                    self._left.discard(id(code))
                    self._vain[id(code)] = min(self._vain.get(id(code), 0), VAIN - AGAIN)
                    return self._follow if self._missing.setdefault(id(code), lines_of(code)) else None
            elif frame.f_globals.get("__name__") != "__main__":
                return self._begin_import(frame, file)
        return None

    def _start(self, code: CodeType, _: int) -> Any:
        """Note the call of a function; what Python calls where a function starts. Functions of other packages are not
        to be told again."""
        if ROOT is None:  # the interpreter ends
            return None
        if not code.co_filename.startswith(ROOT):
            return MONITORING.DISABLE
        number = self._current()
        if self._last.get(id(code)) == number:
            return None
        file = code.co_filename[len(ROOT) :]
        if code.co_name == "<module>":
            if sys._getframe(1).f_globals.get("__name__") != "__main__":
                self._open_import(file)
                MONITORING.set_local_events(TOOL, code, MONITORING.events.PY_RETURN)
            return None
        if id(code) not in self._last:
            self._kept.append(code)
        self._last[id(code)] = number
        self.note(number, f"{file}:{code.co_qualname.partition('.<locals>')[0]}")
        return None

    def _end_import(self, code: CodeType, *_: Any) -> None:
        """Let calls belong to the test again, or to the import around; what Python calls where a function is left."""
        if code.co_name == "<module>" and ROOT is not None and code.co_filename.startswith(ROOT):
            self._close_import((threading.get_ident(), import_number(code.co_filename[len(ROOT) :])))

    def _follow(self, frame: FrameType, event: str, _: Any) -> Any:
        """Note lines of a function that run for the first time in this process."""
        code = frame.f_code
        missing = self._missing[id(code)]
        if event == "line" and missing:
            self._vain[id(code)] += 1
            if frame.f_lineno in missing:
                missing.discard(frame.f_lineno)
                self._vain[id(code)] = 0
                self._write("lines", f"{code.co_filename[len(ROOT) :]}:{frame.f_lineno}\n".encode())
            elif self._vain[id(code)] > VAIN:
                self._left.add(id(code))
        if not missing or id(code) in self._left:
            frame.f_trace_lines = False
            return None
        return self._follow

    def _begin_import(self, frame: FrameType, file: str) -> Any:
        del self._last[id(frame.f_code)]  # imported again, it is to be seen again
        entry = self._open_import(file)
        frame.f_trace_lines = False

        def leave(_: FrameType, event: str, __: Any) -> Any:
            if event == "return":
                self._close_import(entry)
            return leave

        return leave

    def _open_import(self, file: str) -> tuple[int, int]:
        """Let calls belong to the import of a file, in this thread. Return what ends it."""
        entry = (threading.get_ident(), import_number(file))
        self.name(f"import {file}")
        self._imports.append(entry)
        return entry

    def _close_import(self, entry: tuple[int, int]) -> None:
        if entry in self._imports:  # with those that it began, should one have been left otherwise
            del self._imports[len(self._imports) - 1 - self._imports[::-1].index(entry) :]

    def note(self, number: int, words: str) -> None:
        """Write that the test used what the words name."""
        if number:
            self._write("pairs", struct.pack("=II", number, self.name(words)))

    def name(self, words: str) -> int:
        """Return the checksum of the words, which are written once."""
        key = checksum(words)
        if key not in self._known:
            self._known.add(key)
            self._write("words", f"{words}\n".encode())
        return key

    def _write(self, name: str, data: bytes) -> None:
        if self._is_limited:
            self._spare[name].write(data)
        else:
            write(self._files[name], data)

    def _see_limit(self, kind: int, most: int) -> None:
        """Have mapped files before a limit of any kind, after which none may open, and write to them while others may
        not grow."""
        if self._owner != os.getpid():
            self._owner, self._is_limited = os.getpid(), False
            with above_streams():
                for name in self._files:
                    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
                    descriptor = os.open(f"{self.folder}/{name}-{os.getpid()}-{time.time_ns()}", flags)
                    os.ftruncate(descriptor, SPARE)
                    self._spare[name] = mmap.mmap(descriptor, SPARE)
                    os.close(descriptor)
        if kind == resource.RLIMIT_FSIZE:
            self._is_limited = most != resource.RLIM_INFINITY

    def audit(self, event: str, args: tuple) -> None:
        """Note files and folders of the tree that a test reads, and starts of Python that do not write here."""
        if event in ("open", "os.listdir", "os.scandir"):
            self._audit_path("read" if event == "open" else "list", args[0])
        elif event == "resource.setrlimit":
            self._see_limit(args[0], args[1][0])
        elif event == "subprocess.Popen":
            program, words, _, environment = args
            words = [os.fsdecode(word) for word in words] if isinstance(words, list | tuple) else [str(words)]
            has_hook = environment is None or self.folder in str(environment.get("PYTHONPATH", ""))
            if "python" in os.path.basename(os.fsdecode(program or words[0])) and (
                not has_hook or {"-I", "-E", "-S"} & set(words)
            ):
                self.note(self._current(), "unseen")

    def _audit_path(self, kind: str, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        try:
            path = os.path.abspath(os.fsdecode(path))
        except OSError:  # the working folder is gone
            return
        if not path.startswith(ROOT) and path + os.sep != ROOT:
            return
        name = path[len(ROOT) :]
        if name.partition(os.sep)[0] in SKIPPED or name.endswith(".pyc"):
            return
        self._note_read(kind, name)

    def _note_read(self, kind: str, name: str) -> None:
        """Note what a test reads, but no source that Python opens to run it, nor one that dtgpt compares."""
        try:
            frame: FrameType | None = sys._getframe(3)
        except ValueError:  # the interpreter opens its program, and no function runs yet
            reader = name
        else:
            while frame is not None and not frame.f_code.co_filename.startswith(ROOT):
                if any(reader in frame.f_code.co_filename for reader in READERS):
                    return
                frame = frame.f_back
            reader = frame.f_code.co_filename[len(ROOT) :] if frame else ""
        if reader.startswith("dtgpt") and name.startswith("dtgpt"):
            return  # a start of several processes compares their sources, whatever these say
        self.note(self._current(), f"{kind} {name}")


def lines_of(code: CodeType) -> set[int]:
    """Return the numbers of the lines of a function, without its first, that Python can run: without those of functions
    in it."""
    return {line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno}


def write_hook(folder: str, root: str = ROOT, with_lines: bool = False) -> None:
    """Make `folder` an entry of PYTHONPATH with which Python processes write to it from their start on. root: of the
    tree whose functions are of interest, with a slash. with_lines: which lines of `dtgpt/` run, too."""
    Path(folder, "calls_of_tests.py").write_bytes(Path(__file__).read_bytes())
    text = f"import calls_of_tests\n\ncalls_of_tests.ROOT = {root!r}\ncalls_of_tests.start({folder!r}, {with_lines})\n"
    Path(folder, "sitecustomize.py").write_text(text)


def read_files(folder: Path, name: str) -> bytes:
    """Return what processes have written under a name, with the zeros at the end of mapped files."""
    return b"".join(path.read_bytes() for path in (*folder.glob(f"{name}-*"), folder / name) if path.exists())


def read_lines(folder: Path, name: str) -> list[str]:
    """Return the lines that processes have written under a name."""
    return read_files(folder, name).replace(b"\0", b"").decode().splitlines()


def start(folder: str, with_lines: bool = False) -> CallLog:
    """Begin to write in this process and in what it forks."""
    log = CallLog(folder, with_lines)
    sys.addaudithook(log.audit)
    log.follow()
    return log

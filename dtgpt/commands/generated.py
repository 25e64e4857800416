"""Generated texts on the terminal and in files of JSON lines."""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import Self

from dtgpt.commands.prompts import Line
from dtgpt.inference.completion import Completion
from dtgpt.inference.finite import NotFinite
from dtgpt.inference.session import PromptJob, Session
from dtgpt.util.console import counted, duration, say_error, write
from dtgpt.util.errors import UserError, remedy

COLUMNS = 79
LAP = 1.0, 10.0  # seconds between two lines of progress, on a terminal and in a log


def show(session: Session, prompt: str, job: PromptJob, stopped: Callable[[], bool] = lambda: False) -> None:
    """Write a prompt and its continuation to stdout as it is generated, or several when all are complete. `stopped`:
    whether to end with what there is."""
    number, several = session.submit(job), job.rows > 1
    if not several:
        write(prompt)
    asked, found = False, list[Completion]()
    try:
        while session.busy:
            for update in session.finite_step():
                found += update.completions or []
                if not several:
                    write(update.text)
            if stopped() and not asked:
                session.cancel(number)
                asked = True
    finally:
        if not several:
            write("\n")
    if several:
        write_several(prompt, [(one.text or "", one.score) for one in found])
    if any(one.finish_reason == "length" and len(one.ids) < job.options.max_new_tokens for one in found):
        say_error("the text ends early: the options, such as --no-repeat-ngram-size, left no token to draw")


def write_several(prompt: str, found: Sequence[tuple[str, float | None]]) -> None:
    """Write several continuations of a prompt to stdout, beams with their scores."""
    for number, (text, score) in enumerate(found, 1):
        beam = "" if score is None else f", score {score:.4f}"
        write(f"--- {number} of {len(found)}{beam}\n{prompt}{text}\n")


class Keyboard:
    """The user's keyboard, a context in which Ctrl-C does not end the program. `stopped` is true after Ctrl-C, until
    the next prompt."""

    def __init__(self) -> None:
        self._stopped = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._interrupt)
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")
        with suppress(ImportError):
            import readline  # noqa: F401  # gives `input` the keys of a line editor
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def stopped(self) -> bool:
        return self._stopped

    def prompts(self) -> Iterator[str]:
        """Yield the lines that are typed, without blank ones, until the end of the input."""
        while True:
            self._stopped = False
            try:
                line = input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")
            except EOFError:
                return
            if line.strip():
                yield line

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True


def converse(session: Session, keyboard: Keyboard, make: Callable[[str, int], PromptJob]) -> None:
    """Continue one prompt after the other, each without those before it. `make`: the job of a prompt and its number."""
    for turn, prompt in enumerate(keyboard.prompts()):
        try:
            job = make(prompt, turn)
        except UserError as error:
            say_error(f"dtgpt: {error}")
            continue
        try:
            show(session, prompt, job, keyboard.stopped)
        except NotFinite as error:
            say_error(f"dtgpt: {error}")


class ResultFile:
    """Results as JSON lines, one a text: in a new file, or on stdout. What is complete is written at once, so that a
    run that is interrupted leaves all that was done."""

    def __init__(self, path: Path | None):
        self._path = path

    def check(self) -> None:
        """Raise UserError, before anything is generated, where the file cannot be made."""
        if self._path is not None and os.path.lexists(self._path):
            raise UserError(f"{self._path} exists already; give another path")
        if self._path is not None and not self._path.absolute().parent.is_dir():
            raise UserError(f"{self._path.parent} is not a folder; make it, or give another path")

    def write(self, lines: list[Line], results: Iterator[list[Completion]]) -> None:
        """Write the texts of each line in the order of the lines, and progress to stderr. Raise UserError where the
        file cannot be written; it keeps all complete lines. Where nobody reads stdout on, end."""
        progress, done, tokens = ProgressLines(), 0, 0

        def state() -> str:
            count = f"{done}/{counted(len(lines), 'prompt')}, {counted(tokens, 'token')}"
            return f"{count} in {duration(progress.seconds)}, {tokens / progress.seconds:,.0f} tokens/s"

        with self._open() as file:
            for line, completions in zip(lines, results, strict=True):
                for choice, found in enumerate(completions):
                    text = f"{_result(line, choice, found)}\n"
                    if file is not None:
                        self._append(file, text)
                    elif not self._print(text):
                        return
                done += 1
                tokens += sum(len(found.ids) for found in completions)
                progress.say_at_times(state)
        progress.say(state(), f" -> {self._path}\n" if self._path else "\n")

    def _open(self) -> AbstractContextManager[FileIO | None]:
        """Open the new file, without a buffer; no path: stdout, which is None."""
        if self._path is None:
            return nullcontext()
        try:
            return FileIO(self._path, "x")
        except OSError as error:
            raise self._refusal(error) from None

    def _append(self, file: FileIO, text: str) -> None:
        end, rest = file.tell(), memoryview(text.encode())
        try:
            while rest:  # a write may stop before the end, as where a disk becomes full
                rest = rest[file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                file.truncate(end)
            raise self._refusal(error) from None

    def _print(self, text: str) -> bool:
        """Write to stdout; return whether anybody reads it."""
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:  # as after `| head`
            return False
        except OSError as error:
            raise self._refusal(error) from None
        return True

    def _refusal(self, error: OSError) -> UserError:
        advice = remedy(error, "check the disk")
        return UserError(
            f"{self._path or 'stdout'} cannot be written ({error.strerror or error}); {advice}, or give another path"
        )


def _result(line: Line, choice: int, found: Completion) -> str:
    """Return a text as JSON."""
    result = {"line": line.number, "id": line.id, "choice": choice, "prompt": line.prompt, "text": found.text}
    result |= {"finish_reason": found.finish_reason, "tokens": len(found.ids)}
    if line.id is None:
        del result["id"]
    if found.score is not None:  # of a beam; minus infinity, which JSON does not have, where rules ban every token
        result["score"] = found.score if math.isfinite(found.score) else None
    text = json.dumps(result, ensure_ascii=False)
    # Halves of surrogate pairs, which an id may have, can only be escaped.
    return text if _is_unicode(text) else json.dumps(result)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class ProgressLines:
    """Lines of progress on stderr: on a terminal one that is renewed."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._begin = self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return max(time.monotonic() - self._begin, 1e-9)

    def say_at_times(self, text: Callable[[], str]) -> None:
        """Write a line, unless the last one is recent."""
        now = time.monotonic()
        if now - self._last >= LAP[not self._terminal]:
            self._last = now
            self.say(text(), "\r" if self._terminal else "\n")

    def say(self, text: str, end: str = "\n") -> None:
        """Write a line; where nobody reads stderr, nothing."""
        with suppress(OSError):
            sys.stderr.write((text.ljust(COLUMNS) if end == "\r" else text) + end)  # over a longer line before
            sys.stderr.flush()

"""Generated texts on the terminal."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Self

from dtgpt.inference.request import Completion, NotFinite, PromptJob
from dtgpt.inference.session import Session
from dtgpt.util.console import say_error, write
from dtgpt.util.errors import UserError


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
                session.engine.cancel(number)
                asked = True
    finally:
        if not several:
            write("\n")
    if several:
        for place, one in enumerate(found, 1):
            scored = "" if one.score is None else f", score {one.score:.4f}"
            write(f"--- {place} of {len(found)}{scored}\n{prompt}{one.text or ''}\n")
    if any(one.finish_reason == "length" and len(one.ids) < job.options.max_new_tokens for one in found):
        say_error("the text ends early: the options, such as --no-repeat-ngram-size, left no token to draw")


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

"""A user's keyboard, and texts that continue what is typed there."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from dtgpt.commands.generate import NEW_TOKENS, make_job, show
from dtgpt.inference.engine import Engine
from dtgpt.inference.model import Model, Need
from dtgpt.inference.options import read_options
from dtgpt.inference.request import NotFinite, PromptJob
from dtgpt.util.console import say_error
from dtgpt.util.errors import UserError


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


def converse(engine: Engine, keyboard: Keyboard, make: Callable[[str, int], PromptJob]) -> None:
    """Continue one prompt after the other, each without those before it. `make`: the job of a prompt and its number."""
    for turn, prompt in enumerate(keyboard.prompts()):
        try:
            job = make(prompt, turn)
        except UserError as error:
            say_error(f"dtgpt: {error}")
            continue
        try:
            show(engine, prompt, job, keyboard.stopped)
        except NotFinite as error:
            say_error(f"dtgpt: {error}")


def converse_with(model: Model, base: dict[str, Any], options: Any) -> None:
    """Continue what is typed, with the options `base` by name."""

    def prepare() -> tuple[Need, None]:
        model.tokenizer  # noqa: B018  # which says why there is none
        shortest = PromptJob([0], read_options(base, 1, model.config, NEW_TOKENS))
        model.check(shortest)  # options that are wrong for any prompt
        return Need(shortest.rows, shortest.rows), None

    def work(engine: Engine, _: None) -> None:
        model.describe()
        with Keyboard() as keyboard:
            converse(engine, keyboard, lambda prompt, turn: make_job(model, prompt, base, turn))

    model.run(prepare, work)

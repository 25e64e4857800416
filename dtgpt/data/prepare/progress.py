"""Show on stderr how far a preparation is: one line that is redrawn on a terminal, a line now and then elsewhere."""

import sys
import time
from contextlib import suppress
from typing import Self

from dtgpt.util.console import duration

REDRAW, REPEAT = 0.5, 10.0  # seconds between two drawings on a terminal, and between two lines elsewhere


class Progress:
    """`total`: bytes of the inputs on disk, None where unknown; `every`: documents between lines, 0: by time."""

    def __init__(self, total: int | None, every: int = 0):
        self._total, self._every = total, every
        self._terminal = sys.stderr.isatty()
        self._started = self._shown_at = time.monotonic()
        self._shown_documents = 0
        self._drawn = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.clear()

    def clear(self) -> None:
        """Leave the terminal's line empty for what comes next."""
        if self._drawn:
            self._print("\r" + " " * len(self._drawn) + "\r")
            self._drawn = ""

    def update(self, documents: int, text_bytes: int, position: int) -> None:
        """After a block: documents and bytes of text so far, and the position in the inputs, in bytes on disk."""
        now = time.monotonic()
        if self._every and not self._terminal:
            due = documents // self._every > self._shown_documents // self._every
        else:
            due = now - self._shown_at >= (REDRAW if self._terminal else REPEAT)
        if not due:
            return
        self._shown_at, self._shown_documents = now, documents
        line = self._line(documents, text_bytes, position, max(now - self._started, 1e-9))
        if self._terminal:
            self._print("\r" + line.ljust(len(self._drawn)))
            self._drawn = line
        else:
            self._print(line + "\n")

    def _line(self, documents: int, text_bytes: int, position: int, seconds: float) -> str:
        rates = f"{documents / seconds:,.0f} documents/s  {text_bytes / 1e6 / seconds:.1f} MB/s"
        line = f"{documents:,} documents  {rates}"
        if not self._total or not position:
            return line
        done = min(position / self._total, 1.0)
        return f"[{'=' * round(20 * done):20}] {done:4.0%}  {line}  eta {duration(seconds * (1 - done) / done)}"

    def _print(self, text: str) -> None:
        with suppress(OSError):  # a reader that is gone must not end the work
            sys.stderr.write(text)
            sys.stderr.flush()

"""Report on stderr how far a preparation is, and which lines it left out."""

import json
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import IO

from dtgpt.data.text import Broken
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError
from dtgpt.util.shared.words import duration

REDRAW, REPEAT = 0.5, 10.0  # seconds between two drawings on a terminal, and between two lines elsewhere
SHOWN = 20  # broken lines that are named one by one, and files that are named at the end


class Progress:
    """One line that is redrawn on a terminal, a line now and then elsewhere. total: bytes of the inputs on disk, None
    if unknown. every: documents between lines; 0: by time."""

    def __init__(self, total: int | None, every: int = 0):
        self._total, self._every = total, every
        self._terminal = sys.stderr.isatty()
        self._started = self._shown_at = time.monotonic()
        self._shown_documents = 0
        self._drawn = ""

    def clear(self) -> None:
        """Leave the terminal's line empty for what comes next."""
        if self._drawn:
            self._print("\r" + " " * len(self._drawn) + "\r")
            self._drawn = ""

    def update(self, documents: int, text_bytes: int, position: int) -> None:
        """Show documents and bytes of text so far, and the position in the inputs, in bytes on disk."""
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


class BrokenLines:
    """Lines that are left out: the first are named, all are counted by file, and listed in `file` as JSON."""

    def __init__(self, file: IO[bytes] | None, strict: bool, progress: Progress):
        self._file, self._strict, self._progress = file, strict, progress
        self._counts: Counter[str] = Counter()
        self.first: Broken | None = None

    def add(self, lines: list[Broken]) -> None:
        """Report lines, and count them. Raises UserError at the first line under `strict`."""
        for line in lines:
            self.first = self.first or line
            if self._file is not None:
                self._file.write(json.dumps(line._asdict()).encode() + b"\n")  # ASCII: a name may be no UTF-8
            if self._strict:
                raise UserError(f"{line}; nothing was written: fix the line, or drop --strict to leave such lines out")
            self._counts[line.source] += 1
            if self._counts.total() <= SHOWN:
                self._warn(f"{line}; it is left out")
            elif self._counts.total() == SHOWN + 1:
                self._warn("more broken lines follow; they are counted, and --broken FILE lists all")

    def summarise(self) -> None:
        """Name the files that have broken lines, if not each line was named."""
        if self._counts.total() <= SHOWN:
            return
        for source, count in self._counts.most_common(SHOWN):
            self._warn(f"{source}: {counted(count, 'broken line')} left out")
        if len(self._counts) > SHOWN:
            self._warn(f"{len(self._counts) - SHOWN:,} more files have broken lines; --broken FILE lists all")

    def _warn(self, text: str) -> None:
        self._progress.clear()
        say(text, warning=True)

"""Lines that were left out: the first ones are named, all are counted by file, and listed where that is asked for."""

import io
import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Self

from dtgpt.data.prepare.documents import Broken
from dtgpt.data.prepare.progress import Progress
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError
from dtgpt.util.storage import create_file

SHOWN = 20  # lines that are named one by one
FILES = 20  # files that are named at the end


class BrokenLines:
    """`listed`: a file for all of them, an object a line, which appears when the context ends without an error."""

    def __init__(self, listed: Path | None, strict: bool, progress: Progress):
        self._listed, self._strict, self._progress = listed, strict, progress
        self._partial = None if listed is None else listed.with_name(f".{listed.name}.{os.getpid()}.new")
        self._counts: Counter[str] = Counter()
        self.first: Broken | None = None

    def __enter__(self) -> Self:
        if self._partial is not None:
            try:
                self._file = io.TextIOWrapper(create_file(self._partial), encoding="utf-8")
            except OSError as error:
                raise self._failed(error) from None
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._partial is None or self._listed is None:
            return
        try:
            self._file.close()
            if kind is None:
                self._partial.rename(self._listed)
        except OSError as error:
            raise self._failed(error) from None
        finally:
            with suppress(OSError):
                self._partial.unlink()

    def add(self, lines: list[Broken]) -> None:
        """Raises UserError at the first under `strict`."""
        for line in lines:
            self.first = self.first or line
            if self._partial is not None:
                try:
                    self._file.write(json.dumps(line._asdict(), ensure_ascii=False) + "\n")
                except OSError as error:
                    raise self._failed(error) from None
            if self._strict:
                raise UserError(f"{line}; nothing was written: mend the line, or drop --strict to leave such lines out")
            self._counts[line.source] += 1
            self._warn(line, self._counts.total())

    def summarise(self) -> None:
        """Warn of the files that they stand in, where not each was named."""
        if self._counts.total() <= SHOWN:
            return
        self._progress.clear()
        for source, count in self._counts.most_common(FILES):
            say(f"{source}: {counted(count, 'broken line')} left out", warning=True)
        if len(self._counts) > FILES:
            say(f"{len(self._counts) - FILES:,} more files have broken lines; --broken FILE lists all", warning=True)

    def _warn(self, line: Broken, number: int) -> None:
        if number > SHOWN + 1:
            return
        self._progress.clear()
        if number <= SHOWN:
            say(f"{line}; it is left out", warning=True)
        else:
            say("more broken lines follow; they are counted, and --broken FILE lists all", warning=True)

    def _failed(self, error: OSError) -> UserError:
        return UserError(f"--broken {self._listed} cannot be written ({error.strerror}); give another file")

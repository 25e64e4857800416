"""receipts.jsonl: a chain of lines, each with the SHA-256 of the line before it.

    {"receipts": 1, "run": ..., "after": 0, "recipe": ..., "plan": ..., "before": ""}       a start of the run
    {"step": 1, "loss": ..., "norm": ..., "lr": ..., "batch": ..., "digests": ..., "before": ...}
    {"checkpoint": 2, "updates": 2, "samples": 64, "digests": ..., "before": ...}

A run that goes on keeps the lines up to the step from which it does, adds those that its checkpoint has of steps whose
lines were not written, and begins a new start.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from dtgpt.util.console import say
from dtgpt.util.storage import atomic_file, open_regular, parse_json

FILE = "receipts.jsonl"
VERSION = 1


class Line(NamedTuple):
    number: int  # from 1 on
    text: bytes
    value: dict[str, Any]  # empty where the line holds no receipt

    @property
    def step(self) -> int:
        """The step of which the line tells, -1 for one that holds no receipt."""
        return step_of(self.value)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text).hexdigest()

    @property
    def is_start(self) -> bool:
        return "receipts" in self.value


def step_of(value: dict[str, Any]) -> int:
    found = next((value[name] for name in ("after", "checkpoint", "step") if name in value), -1)
    return found if type(found) is int else -1


def read_lines(folder: Path) -> list[Line]:
    """Return the lines of a run's receipts; none without a file. The last one may be half written."""
    if not (folder / FILE).is_file():
        return []
    return [Line(number, text, _value(text)) for number, text in enumerate(read_text(folder).split(b"\n"), 1) if text]


def read_text(folder: Path) -> bytes:
    with open_regular(folder / FILE) as file:
        return file.read()


def _value(text: bytes) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def chained(values: Iterable[dict[str, Any]], before: str) -> list[bytes]:
    """Return the texts of lines that follow the line with this digest."""
    texts = []
    for value in values:
        texts.append(json.dumps({**value, "before": before}, default=repr).encode())
        before = hashlib.sha256(texts[-1]).hexdigest()
    return texts


class Book:
    """The receipts of a run that begins or goes on, open to be written on rank 0."""

    def __init__(self, folder: Path, after: int, start: dict[str, Any], pending: Iterable[dict[str, Any]]):
        """after: the step from which the run goes on. start: the line of this start, but for the run's name. pending:
        lines of the checkpoint from which it does."""
        kept: list[Line] = []
        for line in read_lines(folder):
            if not 0 <= line.step <= after:
                break
            kept.append(line)
        texts = [line.text for line in kept]
        newest = max((line.step for line in kept if not line.is_start), default=-1)
        missing = [value for value in pending if newest < step_of(value) <= after]
        run = next((line.value["run"] for line in kept if line.is_start), None) or secrets.token_hex(8)
        head = {"receipts": VERSION, "run": run, "after": after, **start}
        texts += chained([*missing, head], kept[-1].digest if kept else "")
        with atomic_file(folder / FILE) as file:
            file.writelines(text + b"\n" for text in texts)
        self._before = hashlib.sha256(texts[-1]).hexdigest()
        descriptor = os.open(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        self._file = os.fdopen(descriptor, "ab", buffering=0)

    def write(self, values: list[dict[str, Any]]) -> bool:
        """Add lines, and return whether they are in the file; a full disk leaves it as it was."""
        texts, size = chained(values, self._before), os.fstat(self._file.fileno()).st_size
        data = b"".join(text + b"\n" for text in texts)
        try:
            if self._file.write(data) < len(data):
                raise OSError("only a part could be written")
        except OSError as error:
            os.truncate(self._file.fileno(), size)
            say(f"receipts are not written ({error}); the run goes on, and writes them later", warning=True)
            return False
        if texts:
            self._before = hashlib.sha256(texts[-1]).hexdigest()
        return True

    def sync(self) -> None:
        """Wait until the disk has what was written."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

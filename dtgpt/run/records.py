"""What a run records: the lines of its metrics.jsonl, and where else records go.

A record is a dict with the `step` after which it was made. One thing is to be known before: metrics.jsonl belongs to
its user as much as to dtgpt. A process may be killed within a line, a disk may be full, other programs may have written
lines of their own. So a reader passes over what is no record, and a resume keeps the bytes of what is.
"""

import errno
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from dtgpt.util.field_types import is_finite
from dtgpt.util.storage import atomic_file, open_regular, parse_json

LONGEST_LINE = 1 << 20  # bytes of a record
LARGEST_INT = 1 << 53  # that a float holds exactly, and so the largest step
FORMER = {"valid_loss": "validation_loss", "valid_bits_per_byte": "validation_bits_per_byte"}  # names of older versions


class Begun(NamedTuple):
    """A run that begins or goes on, before anything of it is written."""

    run: Path  # its folder
    step: int  # after which it goes on
    recipe: dict[str, Any]
    values: dict[str, Any]  # of the recipe, by dotted name
    records: list[dict[str, Any]]  # so far, some perhaps of later steps than `step`, which are taken again


class Sink:
    """Where rank 0 sends what a run records. A class of this one has what it needs of these methods."""

    def write(self, record: dict[str, Any]) -> None:
        """Take the `step` and what was measured. OSError: the record is lost, and the run goes on."""

    def examples(self, step: int, texts: dict[str, str]) -> None:
        """Take texts from a step, by name."""

    def finish(self) -> None:
        """Do what is to be done when the last step has been taken, or the run was asked to end."""

    def close(self, failed: bool) -> None:
        """Close what is open. failed: the run ended with an error."""


class JsonLines(Sink):
    """One JSON object a line, flushed at once. After a resume, records past `keep_until_step` are dropped first."""

    def __init__(self, path: Path, keep_until_step: int = 0):
        with_records = ((line, parse_record(line)) for line in metric_lines(path))
        kept = [line for line, record in with_records if record and record["step"] <= keep_until_step]
        with atomic_file(path) as file:
            file.writelines(line.rstrip(b"\n") + b"\n" for line in kept)  # as they are, whoever wrote them
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        self._file = os.fdopen(descriptor, "ab", buffering=0)  # a record is in the file at once
        self._torn = False  # the file ends within a record, so the next one begins a new line

    def write(self, record: dict[str, Any]) -> None:
        finite = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in record.items()}
        line = b"\n" * self._torn + (json.dumps(finite) + "\n").encode()
        self._torn = self._file.write(line) < len(line)
        if self._torn:
            raise OSError(errno.ENOSPC, "only part of a record was written")

    def close(self, failed: bool) -> None:
        self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, without lines that a killed process or a full disk left half written."""
    return [record for record in map(parse_record, metric_lines(path)) if record is not None]


def metric_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a metrics.jsonl; none if the file does not exist. A line above `LONGEST_LINE` is cut
    there, so that it does not parse as a record."""
    if not path.is_file():
        return
    with open_regular(path) as file:
        while line := file.readline(LONGEST_LINE):
            yield line
            while len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, None where it holds none: a JSON object whose `step` is an integer from 0 on. Its
    values are finite numbers, and None for all else: a file may have been written by others, too. Names that older
    versions wrote are those of today."""
    try:
        record = parse_json(line.decode(errors="replace"))
    except ValueError:
        return None
    if not has_step(record):
        return None
    return {FORMER.get(name, name): _number(value) for name, value in record.items() if name.isprintable()}


def has_step(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether a value of JSON is an object whose `step` is an integer from 0 to `LARGEST_INT`."""
    step = value.get("step") if isinstance(value, dict) else None
    return type(step) is int and 0 <= step <= LARGEST_INT


def _number(value: Any) -> float | None:
    """Return a finite number of JSON, as a float where a float holds no integer of its size; None for anything else."""
    if type(value) is int and abs(value) <= LARGEST_INT:
        return value
    return float(value) if is_finite(value) else None

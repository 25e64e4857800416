"""Output for the user's terminal, of which nothing may end a run.

A terminal may be closed, a pipe's reader gone, a disk full, an encoding too small, and texts of others may have
characters that a terminal obeys. Hence everything that a run says goes through `say` and its kin: rank 0 alone prints,
each line is visible and in one piece, and what cannot be written is dropped."""

import errno
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TextIO

# Characters that a terminal obeys, or that turn the direction of others, of texts that others may have written.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk, which may have space again


def say(text: str, warning: bool = False) -> None:
    """Print a line on rank 0 and flush it; a warning goes to stderr. A closed pipe or a full disk does not raise, since
    it must not end a training run."""
    if os.environ.get("RANK", "0") == "0":
        _print(f"warning: {text}" if warning else text, sys.stderr if warning else sys.stdout)


def say_error(text: str) -> None:
    """Print a line to stderr on any rank."""
    _print(text, sys.stderr)


def say_interrupted() -> None:
    if os.environ.get("RANK", "0") == "0":
        say_error("dtgpt: interrupted")


def write(text: str) -> None:
    """Write a piece of a line to stdout and flush it, with the tolerance of `say`, on whichever rank."""
    _write(text, sys.stdout)


def visible(text: str) -> str:
    """Return a text with escapes, as Python writes them, in place of characters that a terminal obeys."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return `1 process` or `1,000 processes`. plural: of the noun, if it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(numbers: Iterable[int]) -> str:
    """Return numbers of which one is to be chosen: "1, 2 or 4"."""
    *words, last = map(str, numbers)
    return f"{', '.join(words)} or {last}" if words else last


def parameters(number: int) -> str:
    """Return `1 parameter`, `12,345 parameters`, `124.4 M parameters` or `175 B parameters`."""
    for size, unit, digits in ((10**9, "B", ".3g"), (10**6, "M", ",.1f")):
        if number >= size:
            return f"{number / size:{digits}} {unit} parameters"
    return counted(number, "parameter")


def byte_size(count: float) -> str:
    """Return `12 B`, `1.5 KiB`, `1.5 MiB` or `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.2f} GiB"


def prepare_streams() -> None:
    """Let characters that the terminal cannot encode be replaced. Open streams that were closed before the start on the
    null device, so that no file of the run gets their descriptors."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, which is the stream's
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def close_streams() -> None:
    """Flush the streams, and drop what cannot be written: Python would turn the failure into the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _drop(stream)


def _print(text: str, stream: TextIO) -> None:
    """Print a line, `visible`: names of files and parts of others' texts may be in it."""
    # In one piece, since processes share a terminal, and print writes "\n" separately.
    _write(f"{visible(text)}\n", stream)


def _write(text: str, stream: TextIO) -> None:
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if error.errno not in FULL:  # the reader is gone, as after `| head`
            _drop(stream)


def _drop(stream: TextIO) -> None:
    """Send further output to the null device."""
    with suppress(OSError):
        number = os.open(os.devnull, os.O_WRONLY)
        os.dup2(number, stream.fileno())
        os.close(number)

"""Words for the user's terminal."""

import errno
import os
import shutil
import sys
import textwrap
from contextlib import suppress
from typing import TextIO

FULL = (errno.ENOSPC, errno.EDQUOT)  # of a disk that may have space again


def say(text: str, warning: bool = False) -> None:
    """Print a line at once; a warning goes to stderr. A reader or a terminal that is gone, or a full disk behind the
    output, must not end a training run."""
    if os.environ.get("RANK", "0") == "0":  # one voice for all processes
        _print(f"warning: {text}" if warning else text, sys.stderr if warning else sys.stdout)


def say_error(text: str) -> None:
    _print(text, sys.stderr)


def counted(number: int, noun: str, plural: str = "") -> str:
    """As `1 process` or `1,000 processes`. plural: the noun's, where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def hanging(line: str, indent: int) -> str:
    """Return a line in as many as the terminal's width needs (80 columns where there is none), each but the first with
    an indent. A word that is wider, such as a path, stays whole."""
    width = max(indent + 20, shutil.get_terminal_size().columns)
    options = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    return textwrap.fill(line, width, subsequent_indent=" " * indent, **options)


def parameters(number: int) -> str:
    """As `1 parameter`, `12,345 parameters`, `124.4 M parameters` or `175 B parameters`."""
    for size, unit, digits in ((10**9, "B", ".3g"), (10**6, "M", ",.1f")):
        if number >= size:
            return f"{number / size:{digits}} {unit} parameters"
    return counted(number, "parameter")


def duration(seconds: float) -> str:
    """Return a time for people, as `45s`, `14m`, `3h05m` or `2d04h`."""
    seconds = round(seconds)
    if seconds < 100:
        return f"{seconds}s"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if minutes < 100:
        return f"{minutes}m"
    return f"{hours}h{minutes % 60:02d}m" if hours < 48 else f"{days}d{hours % 24:02d}h"


def prepare_streams() -> None:
    """Characters that the terminal's encoding lacks are replaced, not refused. A stream that was closed before the
    start leads nowhere: its number must not become that of a file of the run."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free one, which is the stream's own
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def close_streams() -> None:
    """Write what is still to be printed, or drop it: Python would make the failure the exit code of the process."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _drop(stream)


def _print(text: str, stream: TextIO) -> None:
    try:
        stream.write(f"{text}\n")  # at once: print writes the end of a line on its own, and processes share a terminal
        stream.flush()
    except OSError as error:
        if error.errno not in FULL:  # nobody reads on, as after `| head` or when the terminal was closed
            _drop(stream)


def _drop(stream: TextIO) -> None:
    """What is still to come goes nowhere."""
    with suppress(OSError):
        number = os.open(os.devnull, os.O_WRONLY)
        os.dup2(number, stream.fileno())
        os.close(number)

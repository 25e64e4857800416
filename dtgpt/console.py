"""Words for the user's terminal."""

import errno
import os
import sys
from typing import TextIO


def say(text: str, warning: bool = False) -> None:
    """Print a line at once; a warning goes to stderr. A reader that is gone, or a full disk behind the output, must
    not end a training run."""
    if os.environ.get("RANK", "0") == "0":  # one voice for all processes
        _print(f"warning: {text}" if warning else text, sys.stderr if warning else sys.stdout)


def say_error(text: str) -> None:
    _print(text, sys.stderr)


def accept_any_text() -> None:
    """Characters that the terminal's encoding lacks are replaced, not refused."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _print(text: str, stream: TextIO) -> None:
    try:
        stream.write(f"{text}\n")  # at once: print writes the end of a line on its own, and processes share a terminal
        stream.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:  # nobody reads on, as after `| head`: drop what is still to come
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

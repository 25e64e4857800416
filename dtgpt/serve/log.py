"""The log of a server, which never waits for its reader."""

import select
import sys
from typing import TextIO

from dtgpt.util.console import write

PIECE = 1000  # characters: not more bytes than a pipe that takes any has room for (PIPE_BUF, 4,096)


def log(text: str) -> None:
    """Write a line to stdout. What a full pipe or a stopped terminal does not take is dropped: the event loop writes,
    and would answer nobody until somebody reads."""
    line = f"{text}\n"
    for begin in range(0, len(line), PIECE):
        if not takes(sys.stdout):
            return
        write(line[begin : begin + PIECE])


def takes(stream: TextIO | int) -> bool:
    """Return whether a few bytes can be written to a stream without waiting."""
    try:
        poll = select.poll()
        poll.register(stream, select.POLLOUT)
    except (OSError, ValueError, TypeError):  # one in memory, or a closed one
        return True
    return bool(poll.poll(0))

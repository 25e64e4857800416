"""Lines that fit a terminal, and times for people."""

import shutil
import textwrap


def terminal_width() -> int | None:
    """Return the columns of the terminal, or of the variable COLUMNS; None where output goes into a file or a pipe."""
    return shutil.get_terminal_size(fallback=(0, 0)).columns or None


def hanging(line: str, indent: int) -> str:
    """Return a line wrapped to the terminal (80 columns if there is none), with an indent in all lines but the first.
    A longer word, such as a path, is not broken."""
    width = max(indent + 20, shutil.get_terminal_size().columns)
    wrapper = textwrap.TextWrapper(
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return wrapper.fill(line)


def duration(seconds: float) -> str:
    """Return a time for people in its two largest units: `45s`, `3m 20s`, `1h 02m` or `2d 04h`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if hours < 1:
        return f"{minutes}m {seconds % 60:02d}s"
    return f"{hours}h {minutes % 60:02d}m" if days < 1 else f"{days}d {hours % 24:02d}h"

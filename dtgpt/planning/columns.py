"""Columns of the planner's tables."""

from collections.abc import Collection


def short_duration(seconds: float) -> str:
    """Return the time of a step for people: `75.8 ms` or `14.03 s`."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"


def aligned(rows: list[list[str]], words: Collection[int] = (0,)) -> list[str]:
    """Return the rows of a table as lines, with one blank between columns. words: the columns that stand left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append(" ".join(cell.ljust(n) if i in words else cell.rjust(n) for i, (cell, n) in cells).rstrip())
    return lines

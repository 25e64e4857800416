"""Results of tasks for people and for files."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from dtgpt.evaluation.catalog import Asked
from dtgpt.evaluation.files import DataFile
from dtgpt.evaluation.tasks import ERROR, Result

HEADER = ("task", "metric", "value")


class Measured(NamedTuple):
    """A task's result, the file that it comes from, and the seconds that the scores took."""

    asked: Asked
    file: DataFile
    result: Result
    seconds: float


def megatron_lines(line: str) -> str:
    """Return a line of results in the frame that Megatron-LM prints it in."""
    frame = "-" * (len(line) + 1)
    return f"{frame}\n{line}\n{frame}"


def table(results: Sequence[Result]) -> str:
    """Return the metrics of tasks in columns, each with its standard error."""
    rows = [HEADER]
    for result in results:
        for name, value in result.figures.items():
            error = result.metrics.get(f"{name}{ERROR}")
            shown = number_text(value) + ("" if error is None else f" \xb1 {error:.4f}")
            rows.append((result.task, name, shown))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def number_text(value: float) -> str:
    """Return `5,153`, `0.4626`, `19.31` or `4.8517e+08`."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4e}"


def task_lines(measured: Measured) -> str:
    """Return how a task was measured, in one line."""
    result, limit = measured.result, measured.asked.options.limit
    only = " (--limit)" if limit is not None else ""
    return f"{result.task}: {result.samples:,} {result.unit}{only} in {measured.seconds:.1f} s; {result.procedure}"


def as_json(measured: Measured) -> dict[str, Any]:
    """Return a task's result for a file. Figures that JSON does not have are None."""
    result = measured.result
    return {
        "task": result.task,
        "procedure": result.procedure,
        "metrics": {name: value if math.isfinite(value) else None for name, value in result.metrics.items()},
        "samples": result.samples,
        "unit": result.unit,
        "limit": measured.asked.options.limit,
        **result.details,
        "line": result.line,
        "data": {"path": str(measured.file.path), "sha256": measured.file.digest},
        "seconds": measured.seconds,
    }

"""The figures that the scripts of this folder measure: rows of a file, one line of JSON each.

A script hands its figures to `all.py`, which started it, as lines of the file that an environment variable names. A
script that somebody else started only prints."""

import json
import os
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = Path(__file__).with_name("figures.jsonl")
VARIABLE = "BENCHMARK_FIGURES"

Row = dict[str, Any]


def read_rows(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()] if file.exists() else []


def add_rows(file: Path, rows: Iterable[Row]) -> None:
    with file.open("a") as output:
        output.writelines(json.dumps(row) + "\n" for row in rows)


def note(name: str, figures: Mapping[str, float | str | None], rounds: Iterable[float] = ()) -> None:
    """Hand figures over, each under its unit: {"tokens/s": 212651, "ms": 77.0}. `rounds`: what was measured in each
    round. Of several ranks one notes."""
    if VARIABLE not in os.environ:
        return
    known = {unit: value for unit, value in figures.items() if value is not None}
    add_rows(
        Path(os.environ[VARIABLE]), [{"name": name, "figures": known} | ({"rounds": list(rounds)} if rounds else {})]
    )


def ratios(first: list[float], second: list[float]) -> dict[str, float]:
    """How many times as fast the first side is, by the seconds of its rounds: the median and its range."""
    found = sorted(b / a for a, b in zip(first, second, strict=True))
    return {"ratio": statistics.median(found), "lowest": found[0], "highest": found[-1]}

"""How a script of this folder hands its figures to `all.py`, which started it: as lines of the file that an environment
variable names. A script that somebody else started only prints."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

FILE = "BENCHMARK_FIGURES"


def note(name: str, figures: Mapping[str, float | str | None], rounds: Iterable[float] = ()) -> None:
    """Hand figures over, each under its unit: {"tokens/s": 212651, "ms": 77.0}. `rounds`: what was measured in each
    round, in the first figure's unit. Of several ranks one notes."""
    if FILE not in os.environ:
        return
    known = {unit: value for unit, value in figures.items() if value is not None}
    line = {"name": name, "figures": known} | ({"rounds": list(rounds)} if rounds else {})
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def ratios(first: list[float], second: list[float]) -> dict[str, float]:
    """How many times as fast the first side is, by the seconds of its rounds: the median and its range."""
    found = torch.tensor(sorted(b / a for a, b in zip(first, second, strict=True)), dtype=torch.float64)
    return {"ratio": found.quantile(0.5).item(), "lowest": found[0].item(), "highest": found[-1].item()}

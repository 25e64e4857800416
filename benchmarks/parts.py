"""The parts of `all.py`, as parts.toml lists them."""

import tomllib
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("parts.toml")


class Script(NamedTuple):
    """One command of a part. Its rows have the names `LABEL: NAME`."""

    label: str
    words: str
    seconds: int
    tiny: str = ""
    needs: str = ""
    differs: str = ""
    environment: str = ""  # NAME=VALUE
    is_check: bool = False


class Part(NamedTuple):
    name: str
    about: str
    scripts: list[Script]


def parts_of(gpus: int) -> list[Part]:
    """Return what a machine of so many GPUs measures, in order."""
    listed = tomllib.loads(FILE.read_text())["part"]
    return [
        Part(part["name"], part["about"], [Script(**script) for script in part["script"]])
        for part in listed
        if gpus in part["gpus"]
    ]

"""What each start of a run was: the recipe, the code, the data and the machine with which it began or went on.

A run that is resumed may change its plan, its machine and parts of its recipe. `starts.jsonl` has a line for each
start, in the order of time. `recipe.json` and `environment.json` describe the last one, and copies of them, such as
`recipe-step-00000040.json`, those from which the run went on at that step.
"""

import filecmp
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch

from dtgpt.config.execution import Settings
from dtgpt.models.shared.attention_backend import attention_backend
from dtgpt.run.records import has_step
from dtgpt.run.saved_recipe import read_recipe
from dtgpt.util.errors import UserError
from dtgpt.util.shared.device_words import device_name
from dtgpt.util.storage import atomic_file, parse_json, read_regular

STARTS = "starts.jsonl"
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the text of a Python object of a plan's table


def keep_start(
    folder: Path, recipe: dict[str, Any], environment: dict[str, Any], settings: Settings, step: int
) -> None:
    """Keep what the former start was, and add the line of the one that goes on after `step`, before recipe.json and
    environment.json are those of this one."""
    start = {
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "plan": environment["plan"],
        "world": environment["world"],
        # What was decided for this machine, by the names of the recipe's fields.
        "micro_batch_size": settings.micro_batch_size,
        "precision": settings.precision,
        "attention": attention_backend(settings),
        "recompute": settings.recompute,
        "recompute_blocks": settings.recompute_blocks,
        "reduce": settings.reduce,
        "compile": settings.compile,
        "graph": settings.graphs,
        "device": device_name(settings.device),
        "torch": torch.__version__,
        "git": environment.get("git"),
        "code": code_digest(environment["code"]),
        "data": environment["data"]["digest"],
        "tokenizer": environment["data"]["tokenizer"],
        "before": _changed(folder, recipe),
    }
    for name in ("recipe", "environment"):
        keep_old(folder / f"{name}.json", step)
    # A process that is killed here leaves the recipe.json of the former start, with which the next one compares.
    former = [line for line, _ in _start_lines(folder)]
    with atomic_file(folder / STARTS) as file:
        file.writelines(line + b"\n" for line in [*former, json.dumps(start, default=repr).encode()])


def _changed(folder: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the former start, by dotted field name, of the fields in which `recipe` differs from it."""
    try:
        former = flat(read_recipe(folder)) if (folder / "recipe.json").is_file() else {}
    except UserError:
        return {}
    now = flat(parse_json(json.dumps(recipe, default=repr)))
    return {name: value for name, value in former.items() if name in now and now[name] != value}


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Return the starts of a run, oldest first; none for a folder of an older version. Lines that hold no start are
    passed over."""
    return [start for _, start in _start_lines(folder)]


def _start_lines(folder: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield (line, start) of the lines that hold a start."""
    try:
        lines = read_regular(folder / STARTS).splitlines()
    except OSError:
        return
    for line in lines:
        try:
            start = parse_json(line)
        except ValueError:
            continue
        if has_step(start):
            yield line, start


def code_digest(files: dict[str, Any]) -> str:
    """Return one digest of the digests of source files."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:12]


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Return nested values from JSON by dotted names. Addresses in texts are removed: they differ from run to run."""
    found: dict[str, Any] = {}
    left = [("", values)]
    while left:  # without recursion, which a foreign file could nest too deeply for
        prefix, group = left.pop()
        for key, value in group.items():
            if isinstance(value, dict):
                left.append((f"{prefix}{key}.", value))
            else:
                found[f"{prefix}{key}"] = ADDRESS.sub("", value) if isinstance(value, str) else value
    return found


def keep_old(path: Path, step: int) -> None:
    """Keep a file that is about to be replaced as NAME-step-00000040.json, or NAME-step-00000040-2.json if that
    is taken."""
    if not path.is_file():
        return
    for number in count(1):
        copy = path.with_name(f"{path.stem}-step-{step:08d}{f'-{number}' if number > 1 else ''}{path.suffix}")
        if copy.is_file() and filecmp.cmp(path, copy, shallow=False):
            return  # kept when the run went on from here before
        if not os.path.lexists(copy):
            try:
                os.link(path, copy)  # atomic; the new file is another inode
            except OSError:  # a file system without such links
                shutil.copyfile(path, copy)
            return

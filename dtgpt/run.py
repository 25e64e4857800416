"""The run folder: what was asked for, on what it ran, and what came out.

runs/gpt2_tiny-001/
  recipe.json  environment.json  tokenizer.json  metrics.jsonl  loss.png  samples/  checkpoints/
"""

import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dtgpt.device import device_name
from dtgpt.errors import UserError
from dtgpt.recipe import Recipe, to_dict

PACKAGES = ("dtgpt", "torch", "numpy", "einops", "safetensors", "tiktoken", "tokenizers", "triton", "wandb")


def create_run(runs: Path, name: str) -> Path:
    """Make and return the first free folder of `runs/NAME-001`, `runs/NAME-002`, ..."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(p.name[-3:]) for p in runs.glob(f"{name}-[0-9][0-9][0-9]")), default=0)
        while True:
            folder = runs / f"{name}-{number:03d}"
            try:
                folder.mkdir()
                return folder
            except FileExistsError:  # another run began at the same moment
                number += 1
    except OSError as error:
        raise UserError(
            f"runs={runs}: no run folder can be made there ({error.strerror}); give another --runs"
        ) from None


def open_run(path: str) -> Path:
    """The existing run folder at `path`; raises UserError where it is none."""
    folder = Path(path)
    if not (folder / "recipe.json").is_file():
        raise UserError(f"{path} is not a run folder (it has no recipe.json); give one such as runs/gpt2_tiny-001")
    return folder


def describe_run(folder: Path, recipe: Recipe, device: torch.device, data: dict[str, Any]) -> None:
    """Write the resolved recipe and the environment."""
    write_json(folder / "recipe.json", to_dict(recipe))
    write_json(folder / "environment.json", {**environment(device), "data": data})


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device, source revision and command: what one needs to run the same again."""
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))} | {"torch": torch.__version__},
        "cuda": torch.version.cuda,
        "device": device_name(device),
        "git": _git_revision(),
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """Of the checkout that dtgpt runs from, "-dirty" where files differ from it; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

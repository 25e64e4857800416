"""The environment of a run: versions, device, source revision, command."""

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dtgpt.util.hardware import device_name

PACKAGES = ("dtgpt", "torch", "numpy", "einops", "safetensors", "tiktoken", "tokenizers", "triton", "wandb")


def package_versions() -> dict[str, str]:
    """Return the version of each of `PACKAGES` that is installed."""
    return {name: version for name in PACKAGES if (version := _version(name))} | {"torch": torch.__version__}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device, source revision and command: what one needs to run the same again."""
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "cuda": torch.version.cuda,
        "device": device_name(device),
        "git": _git_revision(),
    }


def _git_revision() -> str | None:
    """Of the checkout that dtgpt runs from, "-dirty" where files differ from it; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

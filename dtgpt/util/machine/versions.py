"""What is installed here: versions of packages, the source revision, and all that one needs to run the same again."""

import functools
import os
import platform
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import dtgpt
from dtgpt.util.console import say
from dtgpt.util.shared.device_words import device_name

PACKAGES = (
    "dtgpt",
    "torch",
    "numpy",
    "einops",
    "safetensors",
    "tensorboard",
    "tiktoken",
    "tokenizers",
    "triton",
    "wandb",
)


@functools.cache  # 5 ms, asked for by each save
def package_versions() -> dict[str, str]:
    """Return the version of each of `PACKAGES` that is installed."""
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions | {"torch": torch.__version__}


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions, device, source revision and command: what one needs to run the same again."""
    return {
        "command": sys.argv,
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "cuda": torch.version.cuda,
        "device": device_name(device),
        "git": git_revision(),
    }


def describe_versions() -> str:
    """Return one line: dtgpt with the revision of its checkout, torch, CUDA, Python."""
    revision, cuda = git_revision(), torch.version.cuda
    parts = [
        f"dtgpt {dtgpt.__version__}" + (f" ({revision})" if revision else ""),
        f"torch {torch.__version__}",
        f"CUDA {cuda}" if cuda else "no CUDA",
        f"Python {platform.python_version()}",
    ]
    return ", ".join(parts)


@functools.cache
def git_revision() -> str | None:
    """Return the revision of the checkout that dtgpt runs from, "-dirty" where files differ; None outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def command(words: list[str]) -> int:
    """Run `dtgpt --version`."""
    say(describe_versions())
    return 0

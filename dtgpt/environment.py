"""What a run has been run with: versions of the packages that shape its numbers."""

from importlib import metadata

import torch

PACKAGES = ("dtgpt", "torch", "numpy", "einops", "safetensors", "tiktoken", "tokenizers", "triton", "wandb")


def package_versions() -> dict[str, str]:
    """Return the version of each of `PACKAGES` that is installed."""
    return {name: version for name in PACKAGES if (version := _version(name))} | {"torch": torch.__version__}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

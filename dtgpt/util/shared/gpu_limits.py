"""What GPUs of a kind cannot do, and what to use instead: by compute capability, and by what this torch was built for.

Capabilities that need a kind of GPU ask here. The core asks none of it: `dtgpt.ops.kernels.devices` tells it at the
seams `device_checks` and `device_notes`, before a model is built.
"""

import functools
import importlib.util
from collections.abc import Iterable

import torch

TRITON = importlib.util.find_spec("triton") is not None
SIXTEEN_BITS, FLOAT8, HOPPER = (8, 0), (8, 9), (9, 0)  # least compute capabilities: of bf16, of fp8, of TMA


@functools.cache
def has_float8(device: torch.device) -> bool:
    """Return whether a GPU multiplies 8-bit floats, as those from compute capability 8.9 on do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLOAT8


def oldest_capability(architectures: Iterable[str]) -> tuple[int, int]:
    """Return the least compute capability for which torch has kernels, by names such as sm_90 and compute_120."""
    known = [arch.partition("_")[2].rstrip("af") for arch in architectures if arch.startswith(("sm_", "compute_"))]
    return min(((int(number[:-1]), int(number[-1])) for number in known), default=(0, 0))


def why_no_kernels(name: str, capability: tuple[int, int], architectures: Iterable[str]) -> str | None:
    """Return why this torch cannot compute on a GPU, and what to install; None where it can."""
    oldest = oldest_capability(architectures)
    if capability >= oldest:
        return None
    remedy = "use another GPU, or --device cpu"
    if capability >= (7, 0):  # Volta: the builds for CUDA 12.6 have kernels from 5.0 on
        remedy = "install the build for CUDA 12.6: pip install torch --index-url https://download.pytorch.org/whl/cu126"
    return (
        f"{name} has compute capability {capability[0]}.{capability[1]}, and this torch has kernels from "
        f"{oldest[0]}.{oldest[1]} on; {remedy}"
    )


def what_runs_on(
    name: str, capability: tuple[int, int], dtype: torch.dtype, attention: str, dropout: float
) -> str | None:
    """Return what to use on a GPU of this name and compute capability, which need not be here; None where nothing
    better is known. dtype: of activations."""
    if capability >= SIXTEEN_BITS:
        return None
    wanted = ["--precision fp16"] if dtype == torch.bfloat16 else []
    if attention == "flash" or (attention == "auto" and dtype.itemsize == 2):
        wanted.append(f"--attention {'fused_softmax' if dropout else 'sdpa'}")
    if not wanted:
        return None
    return (
        f"{name} has compute capability {capability[0]}.{capability[1]}, and bf16 and flash attention need 8.0 (A100): "
        f"use {' '.join(wanted)}"
    )

"""What the program runs on: the device, its peak and its memory."""

import resource
import sys

import torch

from dtgpt.errors import UserError
from dtgpt.recipe import Recipe

# Dense bf16 peak in FLOP/s by the vendors' data sheets, by a part of the name that CUDA reports; first match counts.
PEAK_FLOPS = {
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "A100": 312e12, "A40": 149.7e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}  # fmt: skip


def choose_device(recipe: Recipe) -> torch.device:
    """The device of `recipe`; raises UserError where CUDA is asked for and missing."""
    available = torch.cuda.is_available()
    if recipe.device == "cuda" and not available:
        raise UserError(
            "device=cuda, but PyTorch sees no CUDA device; use --device cpu or install a CUDA build of torch"
        )
    return torch.device("cuda", 0) if available and recipe.device != "cpu" else torch.device("cpu")


def choose_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """Of activations; parameters stay fp32."""
    if recipe.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[recipe.precision]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense FLOP/s at bf16, or None where it is not known (and in fp32, whose peak depends on the TF32 setting)."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def peak_memory(device: torch.device) -> tuple[float, float | None]:
    """(largest use so far, size of the device or None) in GiB: of the allocator on CUDA, resident memory on a CPU."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return torch.cuda.max_memory_allocated(device) / 2**30, total / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, None

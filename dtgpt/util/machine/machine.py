"""What is known of machines: peak rates of GPUs, how the C library keeps memory, and errors of allocators."""

import ctypes
import functools
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dtgpt.util.errors import UserError

# Dense peak of 16-bit floats in FLOP/s by the vendors' data sheets, by words of the name that CUDA reports, as regular
# expressions; the first match counts.
PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100S": 130e12,
    "V100-PCIE": 112e12,
    "V100-SXM[23]": 125e12,
    "T4": 65e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}


def peak_of_name(name: str) -> float | None:
    if re.search(r"\b(Laptop|Ti|D|MIG)\b", name):  # other chips, or a part of one, under the same name
        return None
    return next((peak for words, peak in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name)), None)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return dense FLOP/s at 16 bits, where they are known."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    return peak_of_name(torch.cuda.get_device_name(device))


TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # of glibc's `mallopt`
NEVER = -1
LARGEST = 1 << 30  # bytes of a tensor whose memory is kept
STEP = 1 << 26  # bytes by which the process grows


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep what tensors of up to LARGEST bytes free, for the tensors that follow. By its defaults it gives
    their memory back to the system, and a training step has it mapped, cleared and faulted in again page by page. Does
    nothing where the environment sets glibc's `MALLOC_` variables, or where the library is another one."""
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    set_option = ctypes.CDLL(None).mallopt
    for option, value in ((MMAP_THRESHOLD, LARGEST), (TRIM_THRESHOLD, NEVER), (TOP_PAD, STEP)):
        set_option(option, value)


@contextmanager
def memory_errors_as_user_errors(remedy: str) -> Iterator[None]:
    """Raise UserError, with this remedy, instead of what PyTorch raises when memory runs out."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise UserError(f"the device ran out of memory{_in_use()}; {remedy}") from None
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # how PyTorch's CPU allocator fails
            raise
        raise UserError(f"the machine ran out of memory; {remedy}") from None


def _in_use() -> str:
    """Return what the allocator of this process's GPU gave out at most, and what it held for that, in words."""
    if not torch.cuda.is_initialized():
        return ""
    allocated, reserved = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30
    return f" ({allocated:.1f} GiB allocated, {reserved:.1f} GiB reserved)"

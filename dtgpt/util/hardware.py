"""Facts of this machine: devices and their memory.

What this machine cannot do is told before a model is built, and a run says which machine it was on, so that its speed
can be judged and its numbers be had again. The other files take a `torch.device`, and ask here."""

import os
import resource
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from dtgpt.util import seams


def check_device(device: torch.device) -> None:
    """Raise UserError where a capability knows that this torch cannot compute on a GPU."""
    for check in seams.listed("device_checks") if device.type == "cuda" else ():
        check(device)


def total_memory(device: torch.device) -> int:
    """Return the bytes of the device, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def memory_errors_as_user_errors(remedy: str) -> Iterator[None]:
    """Let a capability raise UserError, with this remedy, instead of what PyTorch raises when memory runs out."""
    with ExitStack() as stack:
        for told in seams.listed("memory_errors"):
            stack.enter_context(told(remedy))
        yield


# Memory of which PyTorch's allocator does not know: tensors by their ids, as long as they live.
beside_allocator: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def peak_memory(device: torch.device) -> float:
    """Return the largest use so far in GiB: of the allocator on CUDA, and memory outside it that is counted; resident
    memory on a CPU."""
    if device.type == "cuda":
        beside = sum(tensor.nbytes for tensor in beside_allocator.values())
        return (torch.cuda.max_memory_allocated(device) + beside) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting: through pinned memory where the device is CUDA."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def environment(device: torch.device) -> dict[str, Any]:
    """Return what capabilities say of this machine and what is installed on it."""
    return {name: value for describe in seams.listed("environments") for name, value in describe(device).items()}

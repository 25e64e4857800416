"""Errors of allocators as sentences."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dtgpt.util.errors import UserError


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

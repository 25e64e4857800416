"""A device, and the types in which a run computes on it, in words: for reports, which outlive the machine."""

from typing import TYPE_CHECKING

import torch

from dtgpt.util.console import counted

if TYPE_CHECKING:
    from dtgpt.config.execution import Settings


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the number of threads on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {counted(torch.get_num_threads(), 'thread')}"


def number_types(settings: "Settings") -> str:
    """Return the types of activations and of products."""
    activations = str(settings.dtype).removeprefix("torch.")
    return f"{activations}, products of blocks in {settings.products}" if settings.products else activations

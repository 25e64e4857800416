"""Whether what a plan holds fits a device, before anything is allocated."""

import torch

from dtgpt.config.execution import Settings
from dtgpt.planning.parameters import state_bytes
from dtgpt.util.errors import UserError
from dtgpt.util.hardware import total_memory
from dtgpt.util.shared.device_words import device_name


def check_memory(state: int, local_world: int, device: torch.device) -> None:
    """Raise UserError where `state` bytes (of weights, gradients and optimizer) cannot fit; the `local_world` processes
    of a node share its main memory."""
    needed, total = state / 2**30, total_memory(device) / 2**30
    if device.type == "cpu":
        needed *= local_world
    if needed > total:
        raise UserError(
            f"weights, gradients and optimizer need {needed:,.0f} GiB under this plan, but {device_name(device)} has "
            f"{total:,.0f} GiB; use a smaller model, or a plan that cuts it over more processes (dtgpt plan shows them)"
        )


def check_settings(settings: Settings, rank: int, local_world: int) -> None:
    """Raise UserError where what a rank is going to hold cannot fit; `local_world`: the processes of its node."""
    check_memory(state_bytes(settings, rank), local_world, settings.device)

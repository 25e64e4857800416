"""The energy that a GPU has taken, by NVML's counter."""

import ctypes
from collections.abc import Callable, Mapping

import torch

NVML = "libnvidia-ml.so.1"
TURNS = 2


class Counter:
    """The counter of one GPU, in joules since its driver was loaded; it moves about ten times a second."""

    def __init__(self, device: torch.device):
        """Raises RuntimeError where NVML does not know the GPU or does not count its energy."""
        self._nvml, self._gpu = ctypes.CDLL(NVML), ctypes.c_void_p()
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        self._check(self._nvml.nvmlInit_v2())
        self._check(self._nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._gpu)))

    def joules(self) -> float:
        found = ctypes.c_ulonglong()
        self._check(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu, ctypes.byref(found)))
        return found.value / 1e3

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"NVML answers {code}; the energy of this GPU cannot be read")


def joules_of_steps(
    steps: Mapping[str, Callable[[], object]], counts: Mapping[str, int], device: torch.device
) -> dict[str, float]:
    """Return the joules of a step of each. They take turns of `counts` steps, behind half as many that are not counted,
    since the clock follows the load after a while."""
    counter, found = Counter(device), dict.fromkeys(steps, 0.0)
    for _ in range(TURNS):
        for name, step in steps.items():
            for _ in range(counts[name] // 2):
                step()
            torch.cuda.synchronize(device)
            before = counter.joules()
            for _ in range(counts[name]):
                step()
            torch.cuda.synchronize(device)
            found[name] += (counter.joules() - before) / counts[name] / TURNS
    return found

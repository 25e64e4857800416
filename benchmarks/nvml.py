"""Clocks, power and temperature of a GPU over time, read through NVML, which every driver brings. Nothing is set."""

import ctypes
import threading
import time
from typing import Any, NamedTuple

import torch

SM_CLOCK, MEMORY_CLOCK = 1, 2  # nvmlClockType_t
POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT; nvmlDeviceGetPowerUsage gives the mean of the last second
REASONS = {  # bits of nvmlClocksEventReason
    0x1: "idle", 0x2: "set", 0x4: "power", 0x8: "hardware", 0x10: "sync", 0x20: "thermal", 0x40: "hot", 0x80: "brake",
    0x100: "display",
}  # fmt: skip


class Sample(NamedTuple):
    seconds: float  # of time.monotonic
    watts: float
    clock: int  # MHz of the multiprocessors
    memory_clock: int  # MHz
    celsius: int
    reasons: int  # why the clock is below its maximum: bits, see REASONS


class _FieldValue(ctypes.Structure):
    """nvmlFieldValue_t."""

    _fields_ = (
        ("field", ctypes.c_uint), ("scope", ctypes.c_uint), ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong), ("kind", ctypes.c_int), ("status", ctypes.c_int), ("value", ctypes.c_ulonglong),
    )  # fmt: skip


class Gpu:
    """The GPU that is PyTorch's current device. Raises RuntimeError where NVML fails."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        self._handle = ctypes.c_void_p()
        name = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(self._handle))

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} returned status {status}")

    def _read(self, name: str, *arguments: Any, kind: type[Any] = ctypes.c_uint) -> int:
        found = kind()
        self._call(name, self._handle, *arguments, ctypes.byref(found))
        return int(found.value)

    @property
    def power_limit(self) -> float:
        """Watts."""
        return self._read("nvmlDeviceGetEnforcedPowerLimit") / 1e3

    @property
    def top_clock(self) -> int:
        """MHz that the multiprocessors may reach."""
        return self._read("nvmlDeviceGetMaxClockInfo", SM_CLOCK)

    @property
    def joules(self) -> float:
        """Energy since the driver was loaded."""
        return self._read("nvmlDeviceGetTotalEnergyConsumption", kind=ctypes.c_ulonglong) / 1e3

    def _watts(self) -> float:
        field = _FieldValue(field=POWER_INSTANT)
        self._call("nvmlDeviceGetFieldValues", self._handle, 1, ctypes.byref(field))
        if field.status:
            return self._read("nvmlDeviceGetPowerUsage") / 1e3
        return (field.value & 0xFFFFFFFF) / 1e3  # an unsigned int of the union

    def sample(self) -> Sample:
        reasons = self._read("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
        clocks = self._read("nvmlDeviceGetClockInfo", SM_CLOCK), self._read("nvmlDeviceGetClockInfo", MEMORY_CLOCK)
        return Sample(time.monotonic(), self._watts(), *clocks, self._read("nvmlDeviceGetTemperature", 0), reasons)


class Sampler:
    """Reads a GPU every `interval` seconds on a thread of its own while the context is open."""

    def __init__(self, gpu: Gpu, interval: float = 0.02):
        self.samples: list[Sample] = []
        self._gpu, self._interval, self._end = gpu, interval, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._end.wait(self._interval):
            self.samples.append(self._gpu.sample())

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> list[Sample]:
        """Return the samples of a span of time.monotonic."""
        return [sample for sample in self.samples if begin <= sample.seconds <= end]

"""What kernels need of a device, what a GPU cannot do, and where an op with a gradient of its own may run."""

import functools
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dtgpt.ops import operation
from dtgpt.ops.kernels.torch_private import spare_compiler
from dtgpt.ops.operation import Kernel
from dtgpt.util.errors import UserError
from dtgpt.util.shared.gpu_limits import HOPPER, TRITON, what_runs_on, why_no_kernels

GLUON_VERSIONS = ("3.6.",)  # of Triton: Gluon is experimental, and others have not run the tests on a GPU


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors, or 2 for a CPU on which Triton's interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def has_triton(x: Tensor, *_: Any) -> bool:
    """Return whether Triton's kernels can work on `x`, the first of an operation's arguments."""
    return TRITON and x.is_cuda


@functools.cache
def has_hopper(device: torch.device) -> bool:
    """Return whether a GPU has what came with Hopper, compute capability 9.0: a kernel may start before its predecessor
    has ended (dependent launch), and whole tiles are copied to shared memory (TMA)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER


@functools.cache
def has_gluon(device: torch.device) -> bool:
    """Return whether the kernels that are written in Gluon run on a GPU with the Triton that is installed."""
    if device.type != "cuda":
        return False
    import triton

    return serves_gluon(triton.__version__, torch.cuda.get_device_capability(device))


def serves_gluon(version: str, capability: tuple[int, int]) -> bool:
    """Return whether that is so with a version of Triton and on a compute capability: such kernels call instructions
    that only Hopper GPUs have (wgmma)."""
    return version.startswith(GLUON_VERSIONS) and capability[0] == HOPPER[0]


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use, or those of a Hopper GPU where torch does not say or
    where there is no GPU, as when a plan is made for one."""
    properties = torch.cuda.get_device_properties(device) if torch.cuda.is_available() else None
    return getattr(properties, "shared_memory_per_block_optin", 232448)


def why_no_triton(device: torch.device) -> str | None:
    """Return why Triton's kernels do not run on a device; None where they do."""
    if not TRITON:
        return "Triton is not installed"
    return None if device.type == "cuda" else "they run on GPUs"


def why_below(capability: tuple[int, int], device: torch.device) -> str | None:
    """Return why Triton's kernels that need a compute capability do not run on a device; None where they do."""
    reason = why_no_triton(device)
    if reason is not None or (found := torch.cuda.get_device_capability(device)) >= capability:
        return reason
    return f"it needs compute capability {_version(capability)}, and the GPU has {_version(found)}"


def _version(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def why_no_build(device: torch.device) -> str | None:
    """Return why CUDA kernels are not built for a device when they are needed; None where they are."""
    if device.type != "cuda":
        return "they run on GPUs"
    from torch.utils.cpp_extension import CUDA_HOME  # needs setuptools, and looks for CUDA

    lacking = [name for name, there in (("nvcc", CUDA_HOME), ("ninja", shutil.which("ninja"))) if not there]
    return f"{' and '.join(lacking)} not found" if lacking else None


def by_triton(run: Callable[..., Any], serves: Callable[..., bool] = has_triton, when: str = "on GPUs") -> Kernel:
    """Return a kernel that is written in Triton. The ops of PyTorch around it are registered by now."""
    spare_compiler()
    return Kernel("Triton", serves, run, why_no_triton, when)


def may_fuse(x: Tensor, *_: Any) -> bool:
    """Return `has_triton`, for an op whose backward computes gradients of parameters along with that of `x`."""
    return TRITON and x.is_cuda and not operation._apart


def takes_custom_op(x: Tensor, has_parameters: bool) -> bool:
    """Return whether an op runs as its custom op: where kernels can work, and on the meta device, where planning
    measures what the op saves on a GPU; an op with parameters not under `split_backward`."""
    return (x.is_meta or (TRITON and x.is_cuda)) and not (has_parameters and operation._apart)


def check_kernels(device: torch.device) -> None:
    """Raise UserError where this torch cannot compute on a GPU."""
    capability = torch.cuda.get_device_capability(device)
    if reason := why_no_kernels(torch.cuda.get_device_name(device), capability, torch.cuda.get_arch_list()):
        raise UserError(reason)


def below_ampere(settings: Any) -> str | None:
    """Return what to use on a GPU that has neither bf16 nor what flash attention is written for; None where nothing
    better is known. settings: `dtgpt.config.execution.Settings`."""
    capability = torch.cuda.get_device_capability(settings.device)
    name = torch.cuda.get_device_name(settings.device)
    return what_runs_on(name, capability, settings.dtype, settings.attention, settings.model.dropout)

"""Which ops take their fast path, and on what hardware."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dtgpt.util.hardware import FLOAT8, HOPPER, TRITON

GLUON_VERSIONS = ("3.6.",)  # of Triton: Gluon is experimental, and others have not run the tests on a GPU
_apart = False


def plain_on_cpu(function: Callable[..., Any], op: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a custom op, but in eager execution on a CPU the function that it is made of: at the first call
    of an op that is written in Python, torch imports its compiler, which takes a second."""

    def call(x: Tensor, *more: Any) -> Any:
        is_op = x.is_cuda or type(x) is not Tensor or torch.compiler.is_compiling()
        return op(x, *more) if is_op else function(x, *more)

    return call


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors, or 2 for a CPU on which Triton's interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def has_triton(x: Tensor) -> bool:
    """Return whether Triton's kernels can work on `x`."""
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
def has_float8(device: torch.device) -> bool:
    """Return whether a GPU multiplies 8-bit floats, as those from compute capability 8.9 on do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLOAT8


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use, or those of a Hopper GPU where torch does not say or
    where there is no GPU, as when a plan is made for one."""
    properties = torch.cuda.get_device_properties(device) if torch.cuda.is_available() else None
    return getattr(properties, "shared_memory_per_block_optin", 232448)


def may_fuse(x: Tensor) -> bool:
    """Return `has_triton`, for an op whose backward computes gradients of parameters along with that of `x`."""
    return has_triton(x) and not _apart


def takes_custom_op(x: Tensor, has_parameters: bool) -> bool:
    """Return whether an op runs as its custom op: where kernels can work, and on the meta device, where planning
    measures what the op saves on a GPU; an op with parameters not under `split_backward`."""
    return (x.device.type == "meta" or has_triton(x)) and not (has_parameters and _apart)


def is_apart() -> bool:
    """Return whether `split_backward` is in effect."""
    return _apart


@contextmanager
def split_backward() -> Iterator[None]:
    """Leave gradients of parameters to PyTorch's own ops while the context lasts.

    A pipeline schedule that splits backward computes those gradients separately, which torch 2.11 cannot do for an
    autograd function written in Python.
    """
    global _apart
    _apart = True
    try:
        yield
    finally:
        _apart = False

"""Measure the rates of this machine's GPU: `dtgpt plan RECIPE --calibrate FILE`.

The operations are those of a block of the 345M on 16 samples of 1,024 tokens, attention of 4,096, in short runs. What
whole steps reach of these on an H200 is known (IN_STEPS), and taken to be the same on other GPUs. One GPU says nothing
of links: those of the table are kept.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.attention.core import causal_attention
from dtgpt.ops.fp8.product import product as product_of_8_bits
from dtgpt.planning.gpus import CPU, Gpu, name_of, write_rates
from dtgpt.planning.operation_time import HALF_LENGTH
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.hardware import FLOAT8, SIXTEEN_BITS, device_name

ROUNDS = 15  # of which the first third warms up
LONGER = 4
# What steps of an H200 reach of the same operations alone. Sources: benchmarks/notes: a block's products 1.73 ms alone
# and 1.64 in a step of the 345M with those of the head in both; in fp8 0.99 and 1.00; attention 0.45 and 0.49 ms; a
# copy of 4.28 TB/s, operations between matrices of 3.73.
IN_STEPS = {"products": 1.01, "products_fp32": 1.0, "products_fp8": 0.99, "attention": 0.92, "memory": 0.87}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    samples: int = 16
    length: int = 1024
    heads: int = 16
    head_dim: int = 64
    copied: int = 2**29  # elements

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """The rows, inputs and outputs of a block's matrices."""
        rows, width = self.samples * self.length, self.heads * self.head_dim
        return [(rows, width, 3 * width), (rows, width, width), (rows, width, 4 * width), (rows, 4 * width, width)]


def calibrate(path: Path, gpu: Gpu) -> None:
    """Measure, and write the rates into `path`. Raises UserError where that cannot be a file, where this machine has no
    GPU, and where it has another one than `gpu`, for which the plan is."""
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"--calibrate {path} cannot be written; give a file in a folder that exists")
    if not torch.cuda.is_available():
        raise UserError(f"--calibrate {path} measures a GPU, but PyTorch sees no CUDA device; run it where the GPU is")
    device = torch.device("cuda", 0)
    ours = device_name(device)
    if (name_of(ours) or ours) != (name_of(gpu.name) or gpu.name):
        raise UserError(f"--calibrate {path} measures {ours}, but the plan is for {gpu.name}; leave --gpu out")
    measure(path, device, gpu, Sizes(), seconds=0.2)


def measure(path: Path, device: torch.device, gpu: Gpu, sizes: Sizes, seconds: float) -> None:
    """Measure each rate on `device` in rounds of `seconds`, and write them into `path`."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    dtype = torch.float16 if (0, 0) < capability < SIXTEEN_BITS else torch.bfloat16
    found = {
        "products": _products(device, dtype, sizes, seconds),
        "products_fp32": _products(device, torch.float32, sizes, seconds),
        "products_fp8": _products_of_8_bits(device, sizes, seconds) if capability >= FLOAT8 else 0.0,
        "attention": _attention(device, dtype, sizes, seconds),
        "memory": _memory(device, dtype, sizes, seconds),
    }
    found = {name: rate * IN_STEPS[name] for name, rate in found.items()}
    for name, rate in found.items():
        say(f"{name:<14}{rate / 1e12:10.3f} {'TB/s' if name == 'memory' else 'TFLOP/s'}")
    try:
        write_rates(path, device_name(device), replace(gpu.rates or CPU, **found))
    except OSError as error:
        raise UserError(f"--calibrate {path} cannot be written ({error.strerror}); give another file") from None
    say(f"written: {path}; rates of links and of the network are those of the table\n")


def _time(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the median seconds of a call, of rounds that are queued back to back."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    work()
    begin = now()
    work()
    calls = max(1, round(seconds / max(1e-6, now() - begin)))
    times = []
    for _ in range(ROUNDS):
        begin = now()
        for _ in range(calls):
            work()
        times.append((now() - begin) / calls)
    return statistics.median(times[ROUNDS // 3 :])


def _products(device: torch.device, dtype: torch.dtype, sizes: Sizes, seconds: float) -> float:
    """Return FLOP/s of a block's products: of outputs, gradients of inputs and gradients of weights."""
    made = [_factors(shape, device, dtype) for shape in sizes.shapes]

    def work() -> None:
        for x, weight, gradient in made:
            F.linear(x, weight)
            gradient @ weight
            gradient.T @ x

    return _flops(sizes) / _time(work, device, seconds)


def _products_of_8_bits(device: torch.device, sizes: Sizes, seconds: float) -> float:
    """Return FLOP/s of a block's products of 8-bit floats."""
    made = []
    one = torch.ones((), device=device)
    for shape in sizes.shapes:
        x, weight, gradient = (t.to(torch.float8_e4m3fn) for t in _factors(shape, device, torch.float32))
        turned = [t.T.contiguous() for t in (weight, gradient, x)]
        made += [(x, weight), (gradient, turned[0]), (turned[1], turned[2])]

    def work() -> None:
        for a, b in made:
            product_of_8_bits(a, b, one, one)

    return _flops(sizes) / _time(work, device, seconds)


def _factors(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, a weight and gradients of outputs, of random values: zeros would take less power."""
    rows, inputs, outputs = shape
    sizes = (rows, inputs), (outputs, inputs), (rows, outputs)
    x, weight, gradient = (torch.randn(*size, device=device, dtype=dtype) for size in sizes)
    return x, weight, gradient


def _flops(sizes: Sizes) -> float:
    return sum(3 * 2 * rows * inputs * outputs for rows, inputs, outputs in sizes.shapes)


def _attention(device: torch.device, dtype: torch.dtype, sizes: Sizes, seconds: float) -> float:
    """Return FLOP/s of the attention core in samples of any length: of the causal half of 7 products, with what samples
    of this length lose put back. Samples are LONGER than the others', so that the device is busy for longer than the
    host takes to launch: on an H200 a call at 1,024 tokens took 0.76 ms, of which the kernels are 0.41."""
    length = LONGER * sizes.length
    shape = sizes.samples, length, sizes.heads, sizes.head_dim
    q, k, v = (torch.randn(*shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.ones(*shape, device=device, dtype=dtype)

    def work() -> None:
        torch.autograd.grad(causal_attention(q, k, v), (q, k, v), gradient)

    flops = 7 * sizes.samples * sizes.heads * length**2 * sizes.head_dim
    return flops / _time(work, device, seconds) * (1 + HALF_LENGTH / length)


def _memory(device: torch.device, dtype: torch.dtype, sizes: Sizes, seconds: float) -> float:
    """Return bytes/s, read and written, of a copy."""
    x = torch.randn(sizes.copied, device=device, dtype=dtype)
    y = torch.empty_like(x)
    return 2 * x.nbytes / _time(lambda: y.copy_(x), device, seconds)

"""Products of a block in 8-bit floats beside bf16, and what quantises their factors."""

import torch
from cases import Case, run_cases
from torch import Tensor

from dtgpt.ops.fp8.product import product
from dtgpt.ops.fp8.quantize import quantize
from dtgpt.ops.kernels import activation_kernels, column_kernels, gelu_kernels, quantize_kernels, swiglu_kernels
from dtgpt.ops.kernels.quantize_kernels import QuantizeLaunch

CUDA = torch.device("cuda")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TILE = 1 << 10  # an occupancy that gives every tile a program of its own
TOKENS = 16 * 1024
BOTH = [quantize_kernels.PLAIN, QuantizeLaunch(128, 64, 4, TILE, 1), QuantizeLaunch(64, 64, 4, 8, 2)]
SUMS = [quantize_kernels.WITH_SUMS, QuantizeLaunch(64, 64, 4, 8, 2), QuantizeLaunch(32, 64, 2, 16, 2)]
GELU = [activation_kernels.GELU_FORWARD, activation_kernels.GELU_BACKWARD, QuantizeLaunch(64, 64, 4, 8, 3)]
SWIGLU = [activation_kernels.SWIGLU_FORWARD, activation_kernels.SWIGLU_BACKWARD, QuantizeLaunch(64, 64, 4, 8, 1)]


def cell(value: float = 0.0) -> Tensor:
    return torch.tensor(value, device=CUDA)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16)


def quantize_case(launches: list[QuantizeLaunch], rows: int, columns: int, wanted: tuple[bool, bool, bool]) -> Case:
    """wanted: rows, columns, sums."""
    x, scale, amax = draw(rows, columns), cell(16.0), cell()

    def variant(launch: QuantizeLaunch):
        return lambda: quantize_kernels.quantize(x, scale, E5M2, amax, *wanted, launch=launch)

    named = " + ".join(name for name, use in zip(("rows", "columns", "sums"), wanted, strict=True) if use)
    variants = {f"{tuple(launch)}": variant(launch) for launch in launches}
    if wanted[2]:
        variants["the column sum alone"] = lambda: column_kernels.column_sum(x)
    bytes = x.nbytes + (sum(wanted[:2]) * x.numel())
    return Case(f"quantise {named}, {rows} x {columns}", variants, bytes=bytes)


def gelu_forward_case(launches: list[QuantizeLaunch], rows: int, columns: int) -> Case:
    x, bias, scale, amax = draw(rows, columns), draw(columns), cell(16.0), cell()

    def variant(launch: QuantizeLaunch):
        return lambda: activation_kernels.forward(x, bias, scale, E4M3, amax, True, launch)

    variants = {f"{tuple(launch)}": variant(launch) for launch in launches}
    variants["without quantising"] = lambda: gelu_kernels.bias_gelu_forward(x, bias)
    return Case(f"bias + GELU forward in 8 bits, {rows} x {columns}", variants, bytes=2 * x.nbytes)


def gelu_backward_case(launches: list[QuantizeLaunch], rows: int, columns: int) -> Case:
    x, dy, bias, scale, amax = draw(rows, columns), draw(rows, columns), draw(columns), cell(16.0), cell()

    def variant(launch: QuantizeLaunch):
        return lambda: activation_kernels.backward(dy, x, bias, scale, E5M2, amax, launch)

    variants = {f"{tuple(launch)}": variant(launch) for launch in launches}
    variants["without quantising"] = lambda: gelu_kernels.bias_gelu_backward(dy, x, bias)
    return Case(f"bias + GELU backward in 8 bits, {rows} x {columns}", variants, bytes=3 * x.nbytes)


def swiglu_case(launches: list[QuantizeLaunch], rows: int, columns: int, backward: bool) -> Case:
    """columns: number of pairs."""
    x, dy, scale, amax = draw(rows, 2 * columns), draw(rows, columns), cell(16.0), cell()

    def variant(launch: QuantizeLaunch):
        if backward:
            return lambda: activation_kernels.backward(dy, x, None, scale, E5M2, amax, launch)
        return lambda: activation_kernels.forward(x, None, scale, E4M3, amax, True, launch)

    variants = {f"{tuple(launch)}": variant(launch) for launch in launches}
    if backward:
        variants["without quantising"] = lambda: swiglu_kernels.swiglu_backward(dy, x)
    else:
        variants["without quantising"] = lambda: swiglu_kernels.swiglu_forward(x)
    moved = x.nbytes + dy.nbytes + (x.nbytes if backward else 0)
    return Case(f"SwiGLU {'backward' if backward else 'forward'} in 8 bits, {rows} x {columns}", variants, bytes=moved)


def products_case(rows: int, width: int) -> Case:
    """The twelve products of a block of GPT-2: forward, gradients of inputs, gradients of weights."""
    sizes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]  # outputs, inputs
    plain = [(draw(rows, k), draw(n, k), draw(rows, n)) for n, k in sizes]
    one = cell(1.0)

    def orders(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        q, q_t = quantize(x, cell(16.0), dtype, None, True, True)
        assert q is not None and q_t is not None
        return q, q_t

    both = {E5M2: [], E4M3: []}
    for x, w, dy in plain:
        xs, ws = orders(x, E4M3), orders(w, E4M3)
        for dtype, found in both.items():
            found.append((xs, ws, orders(dy, dtype)))

    def forward(fast: bool):
        return lambda: [product(x[0], w[0], one, one, fast=fast) for x, w, _ in both[E5M2]]

    def inputs(fast: bool, dtype: torch.dtype = E5M2):
        return lambda: [product(dy[0], w[1], one, one, fast=fast) for _, w, dy in both[dtype]]

    def weights(fast: bool, dtype: torch.dtype = E5M2):
        return lambda: [product(dy[1], x[1], one, one, fast=fast) for x, _, dy in both[dtype]]

    variants = {
        "bf16 forward": lambda: [x @ w.t() for x, w, _ in plain],
        "bf16 inputs": lambda: [dy @ w for _, w, dy in plain],
        "bf16 weights": lambda: [dy.t() @ x for x, _, dy in plain],
        "fp8 forward, fast": forward(True),
        "fp8 forward": forward(False),
        "fp8 inputs, fast": inputs(True),
        "fp8 inputs": inputs(False),
        "fp8 inputs of e4m3 gradients": inputs(False, E4M3),
        "fp8 weights, fast": weights(True),
        "fp8 weights": weights(False),
        "fp8 weights of e4m3 gradients": weights(False, E4M3),
    }
    return Case(f"four products, {rows} rows, width {width}", variants, flops=2 * rows * 12 * width**2)


def cases() -> list[Case]:
    found = [products_case(TOKENS, width) for width in (1024, 1600, 2048)]
    found += [quantize_case(BOTH, TOKENS, columns, (True, True, False)) for columns in (1024, 1600, 4096)]
    found += [quantize_case(BOTH, 4096, 1024, wanted) for wanted in [(True, True, False), (True, False, False)]]
    found += [quantize_case(SUMS, TOKENS, 3072, (True, True, True))]
    found += [gelu_forward_case(GELU, TOKENS, 4096), gelu_backward_case(GELU, TOKENS, 4096)]
    found += [swiglu_case(SWIGLU, TOKENS, 8192, backward) for backward in (False, True)]
    return found


if __name__ == "__main__":
    run_cases(cases())

"""RMSNorm with the residual addition before it, SwiGLU and rotary positions, against PyTorch's eager and compiled code
and against a copy of as many bytes."""

from collections.abc import Callable

import torch
from cases import ONE_TILE, Case, both_ways, run_cases, variants_of
from torch import Tensor

from dtgpt.models.llama import LLAMA3_8B, LLAMA32_1B, QWEN3_0_6B, LlamaConfig
from dtgpt.ops import rotary_positions as rotary
from dtgpt.ops.activations import swiglu, swiglu_reference
from dtgpt.ops.kernels import norm_kernels, rotary_kernels, swiglu_kernels
from dtgpt.ops.kernels.column_kernels import ColumnLaunch
from dtgpt.ops.norms import residual_norm, residual_norm_reference
from dtgpt.ops.rotary_positions import angle_table

CUDA = torch.device("cuda")
BATCH, LENGTH, EPS = 4, 4096, 1e-5
RMS_FORWARD = [
    ColumnLaunch(*sizes)
    for sizes in [
        (1, 8, ONE_TILE, 1),
        (2, 8, ONE_TILE, 1),
        (1, 8, 32, 2),
        (2, 8, 16, 2),
        (2, 8, 32, 1),
        (1, 16, ONE_TILE, 1),
        (1, 8, 48, 3),
    ]
]
RMS_BACKWARD = [
    ColumnLaunch(*sizes)
    for sizes in [
        (2, 8, 16, 2),
        (1, 8, 32, 2),
        (1, 8, 32, 1),
        (1, 8, 24, 3),
        (1, 16, 16, 2),
        (2, 8, 16, 1),
        (1, 8, 48, 1),
        (1, 8, 16, 2),
    ]
]
PAIRS = [
    swiglu_kernels.SwigluLaunch(*sizes) for sizes in [(1024, 8), (1024, 4), (512, 4), (2048, 8), (2048, 16), (4096, 8)]
]
HEADS = [
    rotary_kernels.RotaryLaunch(*sizes) for sizes in [(1024, 4), (1024, 8), (512, 4), (512, 2), (256, 2), (2048, 8)]
]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16)


def rms_norm_cases(config: LlamaConfig, whole: bool) -> list[Case]:
    hidden = config.hidden_size
    x, branch, d_sum, d_normed = (draw(BATCH, LENGTH, hidden) for _ in range(4))
    weight, end, name = draw(hidden), (None, 0.0, (0, 0)), f"{BATCH * LENGTH} x {hidden}"
    total, _, _, rrms = norm_kernels.norm_forward(x, branch, None, weight, None, EPS, *end)

    def forward(branch: Tensor | None) -> Callable:
        return lambda launch: norm_kernels.norm_forward(x, branch, None, weight, None, EPS, *end, launch)

    def backward(launch: ColumnLaunch) -> object:
        return norm_kernels.norm_backward(d_normed, d_sum, total, None, rrms, weight, None, *end, launch)

    found = [
        Case(f"RMSNorm forward, {name}", variants_of(RMS_FORWARD, forward(None)), bytes=2 * x.nbytes),
        Case(f"residual RMSNorm forward, {name}", variants_of(RMS_FORWARD, forward(branch)), bytes=4 * x.nbytes),
        Case(f"residual RMSNorm backward, {name}", variants_of(RMS_BACKWARD, backward), bytes=4 * x.nbytes),
    ]
    if whole:
        functions = [
            lambda x, branch, weight, f=f: f(x, branch, None, weight, None, EPS, *end)
            for f in (residual_norm, residual_norm_reference)
        ]
        found.append(both_ways(f"residual RMSNorm, {name}", *functions, [x, branch, weight], 8 * x.nbytes))
    return found


def swiglu_cases(config: LlamaConfig, whole: bool) -> list[Case]:
    width = config.ffn_hidden_size
    x, dy = draw(BATCH, LENGTH, 2 * width), draw(BATCH, LENGTH, width)
    name, once = f"{BATCH * LENGTH} x {width}", x.nbytes + dy.nbytes
    forward = variants_of(PAIRS, lambda launch: swiglu_kernels.swiglu_forward(x, launch))
    backward = variants_of(PAIRS, lambda launch: swiglu_kernels.swiglu_backward(dy, x, launch))
    found = [
        Case(f"SwiGLU forward, {name}", forward, bytes=once),
        Case(f"SwiGLU backward, {name}", backward, bytes=once + x.nbytes),
    ]
    if whole:
        functions = swiglu, swiglu_reference
        found.append(both_ways(f"SwiGLU, {name}", *functions, [x], 2 * once + x.nbytes))
    return found


def rotary_cases(config: LlamaConfig, whole: bool) -> list[Case]:
    groups, parts, size = config.num_kv_heads, config.num_heads // config.num_kv_heads + 2, config.head_dim
    qkv = draw(BATCH, LENGTH, groups, parts, size)
    weights = [draw(size), draw(size)] if config.qk_norm else []
    table = angle_table(config.rotation, size, LENGTH, CUDA)
    name = f"{BATCH * LENGTH} x {groups} x {parts} x {size}" + (", with norms" if weights else "")
    rest, read = (None, table, *(weights or (None, None)), EPS), qkv if weights else None
    made = rotary_kernels.rotary_forward(qkv, *rest)
    forward = variants_of(HEADS, lambda launch: rotary_kernels.rotary_forward(qkv, *rest, launch))
    backward = variants_of(HEADS, lambda launch: rotary_kernels.rotary_backward(*made, read, *rest, launch))
    number = 2 * qkv.nbytes
    found = [
        Case(f"rotary forward, {name}", forward, bytes=number),
        Case(
            f"rotary backward, {name}", backward, bytes=number + (qkv.nbytes * (parts - 1) // parts if weights else 0)
        ),
    ]
    if whole:

        def fast(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            return rotary.rotary_qkv(qkv, None, config.rotation, LENGTH, *weights, eps=EPS)

        def plain(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            return rotary.reference(qkv, None, table, *weights, eps=EPS)

        found.append(both_ways(f"rotary, {name}", fast, plain, [qkv, *weights], 2 * number))
    return found


def cases() -> list[Case]:
    found = []
    for make in (rms_norm_cases, swiglu_cases, rotary_cases):
        found += make(LLAMA32_1B, True) + make(LLAMA3_8B, False)
    return found + rotary_cases(QWEN3_0_6B, True)


if __name__ == "__main__":
    run_cases(cases())

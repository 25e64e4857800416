"""Launch the CUDA kernels of the softmax, `softmax.cu`, through their C interface."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dtgpt.ops.kernels.extension import library
from dtgpt.ops.random.dropout import HALF, keep_scale, threshold

LONGEST = 16384  # columns of a row that a block holds in registers
OCTET = 8  # columns that a thread reads at once
SOURCE = Path(__file__).with_name("softmax.cu")
# Subnormals are flushed to 0 and divisions are accurate to 2 ulp, so exponentials and quotients are one instruction.
FLAGS = ("-ftz=true", "-prec-div=false")
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class SoftmaxLaunch(NamedTuple):
    """How rows are distributed over threads."""

    threads: int  # of a block whose rows have one warp each
    most_octets: int  # 1, 2 or 4: rows longer than 256 of these columns are shared by several warps


FORWARD = SoftmaxLaunch(threads=64, most_octets=4)
BACKWARD = SoftmaxLaunch(threads=64, most_octets=4)


class Problem(ctypes.Structure):
    """The arguments of a kernel; softmax_kernels.cuh has the meaning of the fields."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "grad", "mask", "key", "result", "log_sums")),
        *((name, ctypes.c_int64) for name in ("mask_batch", "mask_query")),
        *((name, ctypes.c_int) for name in ("rows", "heads", "queries", "columns", "causal", "aligned", "type")),
        *((name, ctypes.c_float) for name in ("scale", "keep_scale")),
        *((name, ctypes.c_uint) for name in ("drop", "first_head", "first_query", "first_octet")),
        *((name, ctypes.c_int) for name in ("threads", "most_octets")),
    )


STRUCTS = (("Problem", Problem),)  # that softmax.cu has, too


def built(device: torch.device) -> ctypes.CDLL | None:
    """Return the library of the kernels, or None where it cannot be built."""
    return library(SOURCE, device, FLAGS, structs=STRUCTS)


def serves(scores: Tensor, scale: float, start: Sequence[int]) -> bool:
    """Return whether the kernels can process these CUDA tensors; build them if necessary."""
    rows, columns = scores.shape[:-1].numel(), scores.shape[-1]
    # Four threads draw the decisions of 32 columns, and the largest score is looked for before scores are scaled.
    possible = 0 < rows < 2**31 and 0 < columns <= LONGEST and start[2] % HALF == 0 and scale > 0
    return possible and scores.dtype in TYPES and built(scores.device) is not None


def launch(
    how: SoftmaxLaunch,
    input: Tensor,
    grad: Tensor | None,
    result: Tensor,
    log_sums: Tensor,
    mask: Tensor | None,
    key: Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    start: Sequence[int],
) -> None:
    """Write `result` and, in forward under dropout, `log_sums`. All tensors are contiguous; a `grad` means backward.

    Raises RuntimeError where CUDA refuses the launch.
    """
    _, heads, queries, columns = input.shape
    drop = 0 if key is None else threshold(p)
    vectors = [tensor for tensor in (input, grad, result, mask) if tensor is not None]
    mask_queries = 1 if mask is None else mask.shape[2]
    problem = Problem(
        *(None if tensor is None else tensor.data_ptr() for tensor in (input, grad, mask, key, result, log_sums)),
        mask_batch=mask_queries * columns,
        mask_query=columns if mask_queries > 1 else 0,
        rows=input.shape[:-1].numel(),
        heads=heads,
        queries=queries,
        columns=columns,
        causal=causal,
        aligned=columns % OCTET == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in vectors),
        type=TYPES[input.dtype],
        scale=scale,
        keep_scale=1.0 if key is None else keep_scale(p),
        drop=drop,
        first_head=start[0],
        first_query=start[1],
        first_octet=start[2] // OCTET,
        threads=how.threads,
        most_octets=how.most_octets,
    )
    kernels = built(input.device)
    assert kernels is not None  # `serves` said so
    function = kernels.launch_softmax
    function.restype, function.argtypes = ctypes.c_char_p, (ctypes.POINTER(Problem), ctypes.c_int, ctypes.c_void_p)
    with torch.cuda.device(input.device):
        failure = function(problem, grad is not None, torch.cuda.current_stream().cuda_stream)
    if failure is not None:
        raise RuntimeError(f"the softmax kernel was not launched: {failure.decode()}")

"""A Triton kernel that adds up the digests of a list of tensors in one launch. Needs Triton.

A few programs for each multiprocessor share the chunks of the part whose number they read on the device. A chunk is a
run of neighbours in the whole tensor, so that an index is the first one's and a count.
"""

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.receipts.digest import CHUNK, FIRST, MIXES, SECOND, Piece, key_of, signed

PROGRAMS, WARPS = 8, 8  # programs of a multiprocessor, and the warps of each
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Table:
    """What the kernel reads of the pieces: on the device, and the same in every step but for the addresses."""

    def __init__(self, pieces: Sequence[Piece], parts: int, device: torch.device, chunk: int = CHUNK):
        self.chunk = chunk
        rows = [[piece.slot, *map(signed, key_of(piece.label))] for piece in pieces] or [[0, 0, 0]]
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)  # [N, 3]: slot, key
        self.bases = torch.zeros(max(1, len(pieces)), dtype=torch.int64, device=device)  # addresses
        self._cells, self._known = self.bases.unbind(), list[int]()
        found = [(piece.part, _chunks(number, piece, chunk)) for number, piece in enumerate(pieces)]
        ordered = [chunks for part in range(parts) for own, chunks in found if own == part]
        counts = [sum(len(chunks) for own, chunks in found if own == part) for part in range(parts)]
        ends = torch.tensor([0, *counts]).cumsum(0)
        bounds = [[int(a), int(b)] for a, b in itertools.pairwise(ends)] + [[0, int(ends[-1])]]
        self.bounds = torch.tensor(bounds, device=device)  # [parts + 1, 2]: chunks of a part; last those of all
        self.chunks = torch.cat([torch.zeros(0, 4, dtype=torch.int64), *ordered]).to(device)  # [C, 4]
        self.grid = PROGRAMS * _multiprocessors(device)

    def add(self, tensors: Sequence[Tensor], part: Tensor, sums: Tensor, row: Tensor) -> None:
        """Add the digests of the tensors of a part to a row of `sums`, int64 `[rows, slots]`, in one launch for each
        dtype. part, row: int64 scalars on the device."""
        tensors = [tensor.contiguous() for tensor in tensors]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors) if len(self.chunks) else ():
            # Addresses reach the device as arguments of a kernel: no memory of the host has to outlive a copy, and a
            # CUDA graph keeps those that it captured.
            addresses = [tensor.data_ptr() if tensor.dtype == dtype else 0 for tensor in tensors]
            if addresses != self._known:  # those of weights and states stay what they are
                self.bases.zero_()
                torch._foreach_add_(self._cells, addresses)
                self._known = addresses
            _add[(self.grid,)](
                self.chunks,
                self.bounds,
                self.rows,
                self.bases,
                part,
                sums,
                row,
                sums.shape[1],
                DTYPE=DTYPES[dtype],
                CHUNK=self.chunk,
                PROGRAMS=self.grid,
                num_warps=WARPS,
            )


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _chunks(number: int, piece: Piece, size: int) -> Tensor:
    """Return the chunks of a piece, int64 `[C, 4]`: its number, place in memory, index in the whole, elements."""
    begins, length = piece.runs()
    if not length or not len(begins):
        return torch.zeros(0, 4, dtype=torch.int64)
    within = torch.arange(0, length, size)
    index = (begins[:, None] + within).flatten()
    place = (torch.arange(len(begins))[:, None] * length + within).flatten()
    count = (length - within).clamp(max=size).repeat(len(begins))
    return torch.stack([torch.full_like(index, number), place, index, count], dim=1)


M00, M01, M02, M03, M04 = (tl.constexpr(number) for number in MIXES[0])
M10, M11, M12, M13, M14 = (tl.constexpr(number) for number in MIXES[1])
FACTOR0, FACTOR1 = tl.constexpr(FIRST), tl.constexpr(SECOND)


@triton.jit
def _mix(x, S0: tl.constexpr, F0: tl.constexpr, S1: tl.constexpr, F1: tl.constexpr, S2: tl.constexpr):
    x ^= x >> S0
    x *= tl.full([1], F0, tl.uint32)
    x ^= x >> S1
    x *= tl.full([1], F1, tl.uint32)
    return x ^ (x >> S2)


@triton.jit
def _add(
    chunks,
    bounds,
    rows,
    bases,
    part,
    sums,
    row,
    slots,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    own = tl.load(part)
    begin, end = tl.load(bounds + 2 * own), tl.load(bounds + 2 * own + 1)
    sums += tl.load(row) * slots
    for number in range(begin + tl.program_id(0), end, PROGRAMS):
        chunk = chunks + 4 * number
        piece = tl.load(chunk)
        base = tl.load(bases + piece)
        if base != 0:
            values = base.to(tl.pointer_type(DTYPE)) + tl.load(chunk + 1)
            index, count = tl.load(chunk + 2), tl.load(chunk + 3)
            key0, key1 = tl.load(rows + 3 * piece + 1).to(tl.uint32), tl.load(rows + 3 * piece + 2).to(tl.uint32)
            # Whole chunks at multiples of 16 bytes, as nearly all are, are read 16 bytes at a time.
            if (count == CHUNK) & (values.to(tl.int64) % 16 == 0):
                total = _total(tl.multiple_of(values, 16), index, None, key0, key1, CHUNK)
            else:
                total = _total(values, index, count, key0, key1, CHUNK)
            tl.atomic_add(sums + tl.load(rows + 3 * piece), total, sem="relaxed")


@triton.jit
def _total(values, index, count, key0, key1, CHUNK: tl.constexpr):
    at = tl.arange(0, CHUNK)
    inside = None if count is None else at < count
    bits = (tl.load(values + at, inside).to(tl.float32) + 0.0).to(tl.uint32, bitcast=True)
    index += at
    place = (index ^ (index >> 32)).to(tl.uint32)
    first = _mix(bits + (place * tl.full([1], FACTOR0, tl.uint32) + key0), M00, M01, M02, M03, M04)
    second = first ^ (place * tl.full([1], FACTOR1, tl.uint32) + key1)
    second = _mix(second, M10, M11, M12, M13, M14)
    hashed = first.to(tl.int64) + (second.to(tl.int64) << 32)
    return tl.sum(hashed if inside is None else tl.where(inside, hashed, 0), axis=0)

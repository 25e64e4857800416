"""The Triton kernel of `dtgpt.ops.sampling.sample`. Needs Triton."""

import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.sampling.sequences import Sequences

BLOCK = 64  # sequences that a program takes


def launch_record(sequences: Sequences, slots: Tensor, tokens: Tensor) -> None:
    """Launch the kernel of `record`."""
    rows, positions = len(slots), sequences.history.shape[1]
    arguments = sequences.token, sequences.position, sequences.history, slots, tokens.contiguous(), rows, positions
    record_kernel[(triton.cdiv(rows, BLOCK),)](*arguments, BLOCK=BLOCK, num_warps=2)


@triton.jit
def record_kernel(token, position, history, slots, tokens, rows, positions, BLOCK: tl.constexpr):
    """Write the new tokens `[B]` to token and history of their slots, and advance position."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slots + row, inside, 0)
    new = tl.load(tokens + row, inside, 0)
    at = tl.minimum(tl.load(position + slot, inside, 0) + 1, positions - 1)
    tl.store(token + slot, new, inside)
    tl.store(position + slot, at, inside)
    tl.store(history + slot * positions + at, new, inside)

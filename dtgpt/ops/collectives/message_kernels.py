"""A Triton kernel that waits for a message from another GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from dtgpt.ops.collectives.peer_kernels import PATIENCE


@triton.jit
def _wait_kernel(flag):
    first = globaltimer()
    while tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys") != 1:
        if globaltimer() - first > PATIENCE:
            tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [1], tl.int32, is_pure=False, pack=1)


def launch_wait(flag: Tensor) -> None:
    """Hold the current stream until the int32 `flag [1]` is 1, and set it to 0."""
    with torch.cuda.device(flag.device):
        _wait_kernel[(1,)](flag, num_warps=1)

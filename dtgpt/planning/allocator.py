"""What PyTorch's allocator and libraries take on a GPU beside the bytes of tensors."""

from functools import lru_cache

MIB = 1 << 20
# cuBLAS's, of the thread that runs forward passes and of autograd's, on Hopper; older GPUs take a quarter.
WORKSPACES = 2 * 32 * MIB
SMALL, LARGE, SEGMENT, STEP = 1 * MIB, 10 * MIB, 20 * MIB, 2 * MIB  # of torch's CUDACachingAllocator


@lru_cache(maxsize=4096)
def padding(size: int) -> float:
    """Return the bytes by which the block of a tensor of `size` bytes is larger. A segment is a multiple of STEP, or
    SEGMENT for tensors below LARGE, and is not split where SMALL or less would be left."""
    if size <= SMALL:
        return -size % 512
    if size >= LARGE:
        left = -size % STEP
        return left if left <= SMALL else 0
    count, left = divmod(SEGMENT, size)
    return left / count if left <= SMALL else 0

"""A switch of PyTorch that is experimental, for the products of captured steps."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dtgpt.util.shared.stderr import stderr_dropped


@contextmanager
def without_split_k(device: torch.device) -> Iterator[None]:
    """Let no 16-bit matrix product on a CUDA device split the dimension that it sums over, inside of the block.

    Whether cuBLAS splits that dimension depends on the number of rows, and the order of the sums depends on the split.
    A CUDA graph that is captured inside keeps the products it was captured with. PyTorch has the switch for cuBLASLt
    alone, and raises RuntimeError from other libraries while it is set: all products inside are cuBLASLt's.
    """
    if device.type != "cuda":
        yield
        return
    backends = torch.backends.cuda
    # The attributes are typed as bool, but they take (allow_reduced_precision, allow_splitk) as well.
    settings, library = backends.matmul, backends.preferred_blas_library()
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    before = [(getattr(settings, name), getattr(settings, f"{name}_split_k")) for name in names]
    with stderr_dropped():  # PyTorch says once a process that the switch is experimental, perhaps within a text
        backends.preferred_blas_library("cublaslt")
    try:
        for name in names:
            setattr(settings, name, (False, False))
        yield
    finally:
        for name, values in zip(names, before, strict=True):
            setattr(settings, name, values)
        backends.preferred_blas_library(library)

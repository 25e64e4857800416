"""What serves the passes of the cross-entropy over logits: Triton kernels, each of which reads and writes them once."""

from torch import Tensor

from dtgpt.ops.kernels.devices import by_triton, has_triton


def kernels():
    from dtgpt.ops.kernels import cross_entropy_kernels  # imported on first use, since it needs Triton

    return cross_entropy_kernels


def _has_columns(logits: Tensor, targets: Tensor, start: int, real: int, cap: float = 0.0) -> bool:
    return real != 0 and has_triton(logits)


TERMS = (by_triton(lambda *each: kernels().launch_terms(*each), _has_columns, "on GPUs, unless all is padding"),)
GRADIENT = (by_triton(lambda *each: kernels().launch_gradient(*each)),)
LOSSES = (by_triton(lambda *each: kernels().launch_loss(*each)),)
SCALED = (  # PyTorch's product of two dtypes is slower, since it reads one element at a time
    by_triton(
        lambda *each: kernels().launch_scaled(*each),
        lambda x, factor: has_triton(x) and x.is_contiguous(),
        "on GPUs, of contiguous tensors",
    ),
)

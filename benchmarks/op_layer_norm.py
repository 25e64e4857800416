"""LayerNorm with the residual addition before it, against PyTorch's eager and compiled code."""

import torch
from cases import ONE_TILE, Case, both_ways, run_cases, variants_of
from torch import Tensor

from dtgpt.ops.kernels import norm_kernels as kernels
from dtgpt.ops.kernels.column_kernels import ColumnLaunch
from dtgpt.ops.norms import residual_norm, residual_norm_reference
from dtgpt.ops.random.philox import fold, root_key

CUDA = torch.device("cuda")
EPS, P = 1e-5, 0.1
FORWARD = [ColumnLaunch(*sizes) for sizes in [(2, 8, 24, 1), (2, 8, 24, 2), (4, 8, 16, 2), (2, 8, ONE_TILE, 1)]]
BACKWARD = [
    ColumnLaunch(*sizes) for sizes in [(2, 8, 16, 1), (2, 8, 16, 2), (2, 8, 16, 3), (4, 8, 12, 1), (4, 8, 12, 2)]
]
BACKWARD += [ColumnLaunch(*sizes) for sizes in [(1, 8, 20, 2), (2, 16, 8, 2)]]


def draw(samples: int, length: int, columns: int) -> tuple[list[Tensor], Tensor]:
    """(x, branch, branch_bias, weight, bias), the key of each sample."""
    shapes = [(samples, length, columns)] * 2 + [(columns,)] * 3
    inputs = [torch.randn(shape, device=CUDA, dtype=torch.bfloat16) for shape in shapes]
    return inputs, fold(root_key(1), torch.arange(samples)).to(CUDA)


def title(direction: str, x: Tensor, key: Tensor | None) -> str:
    return f"residual norm {direction}, {x[..., 0].numel()} x {x.shape[-1]}" + (", dropout" if key is not None else "")


def forward_case(launches: list[ColumnLaunch], *sizes: int, dropout: bool = True) -> Case:
    inputs, key = draw(*sizes)
    key = key if dropout else None
    variants = variants_of(launches, lambda launch: kernels.norm_forward(*inputs, EPS, key, P, (0, 0), launch))
    return Case(title("forward", inputs[0], key), variants, bytes=4 * inputs[0].nbytes)


def backward_case(launches: list[ColumnLaunch], *sizes: int, dropout: bool = True) -> Case:
    inputs, key = draw(*sizes)
    (x, branch, shift, weight, _), key = inputs, key if dropout else None
    total, _, mean, rstd = kernels.norm_forward(*inputs, EPS, key, P, (0, 0))
    saved = (x, branch, total, mean, rstd, weight, shift, key, P, (0, 0))
    variants = variants_of(launches, lambda launch: kernels.norm_backward(*saved, launch))
    return Case(title("backward", x, key), variants, bytes=(5 if dropout else 4) * x.nbytes)


def whole_case(*sizes: int, dropout: bool = True) -> Case:
    """Forward and backward through autograd."""
    inputs, key = draw(*sizes)
    rest = (EPS, key if dropout else None, P, (0, 0))
    functions = [lambda *given, f=f: f(*given, *rest) for f in (residual_norm, residual_norm_reference)]
    name = f"residual norm, {sizes[0] * sizes[1]} x {sizes[2]}{', dropout' * dropout}"
    return both_ways(name, *functions, inputs, (9 if dropout else 8) * inputs[0].nbytes)


def norm_case(samples: int, length: int, columns: int) -> Case:
    """LayerNorm alone, backward."""
    (x, dy, _, weight, bias), _ = draw(samples, length, columns)
    _, mean, rstd = torch.native_layer_norm(x, (columns,), weight, bias, EPS)
    flat = mean.flatten(), rstd.flatten()
    saved = (dy, None, x, *flat, weight, None, None, 0.0, (0, 0))
    variants = {
        "ours": lambda: kernels.norm_backward(*saved),
        "aten": lambda: torch.ops.aten.native_layer_norm_backward(
            dy, x, (columns,), mean, rstd, weight, bias, (True,) * 3
        ),
    }
    return Case(f"LayerNorm alone, backward, {samples * length} x {columns}", variants, bytes=3 * x.nbytes)


def cases() -> list[Case]:
    few = [*BACKWARD[:2], BACKWARD[4]]
    found = [backward_case(BACKWARD, 32, 1024, 1024), forward_case(FORWARD, 32, 1024, 1024)]
    found += [whole_case(32, 1024, 1024), whole_case(16, 1024, 1024, dropout=False), norm_case(32, 1024, 1024)]
    sizes = [(16, 1024, 1024), (8, 1024, 1024), (8, 512, 1024), (64, 1024, 768), (8, 1024, 1600)]
    found += [backward_case(few, *size) for size in sizes]
    return [*found, backward_case(few, 16, 1024, 1024, dropout=False), forward_case(FORWARD[:2], 64, 1024, 768)]


if __name__ == "__main__":
    run_cases(cases())

"""Dropout (Srivastava et al. 2014) whose mask is a pure function of (key, global element index).

Reference: plain torch that Inductor fuses. Philox runs once for every eight neighbours of the last dimension (each of
its four words serves two of them with 16 bits) and leaves one byte, so the kernel that applies the mask reads 1/16 of
the bytes of a bf16 activation. Fast path: a Triton kernel that draws the mask in registers. Backward draws the mask
again: nothing of the size of the activation is saved.

Sharding rule: a shard passes the global index of its first element as `start`, and draws its part of the global mask.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dtgpt.ops.fast import has_triton
from dtgpt.ops.random import block_words, covering_blocks, fold

LANES = 8  # elements that share one evaluation of Philox
Site = tuple  # (key [B, 2] or None, p) and, of a shard, its start: see `Dropout.site`
LEVELS = 1 << 16  # a keep decision compares 16 bits, so p is rounded to a multiple of 2^-16


def threshold(p: float) -> int:
    """How many of the 2^16 equally likely values drop an element."""
    return min(round(p * LEVELS), LEVELS - 1)


def keep_bytes(key: Tensor, ranges: Sequence[range], p: float) -> Tensor:
    """Keep decisions, eight to a byte: uint8 `[*key batch, *leading, blocks]`, bit i for lane i of the block."""
    *leading, last = ranges
    blocks, _ = covering_blocks(last, LANES)
    drop = threshold(p)
    packed = None
    for i, word in enumerate(block_words(key, leading, blocks)):
        low = (word & 0xFFFF >= drop).to(torch.uint8) << 2 * i
        high = (word >> 16 >= drop).to(torch.uint8) << 2 * i + 1
        packed = low | high if packed is None else packed | low | high
    return packed


def keep_mask(key: Tensor, ranges: Sequence[range], p: float) -> Tensor:
    """True where an element is kept: bool `[*key batch, *ranges]`. Equal to the same cut of the whole tensor's mask."""
    packed = keep_bytes(key, ranges, p).unsqueeze(-1)
    lanes = torch.arange(LANES, dtype=torch.uint8, device=key.device)
    _, cut = covering_blocks(ranges[-1], LANES)
    return ((packed >> lanes) & 1).bool().flatten(-2)[..., cut]


def _apply(x: Tensor, key: Tensor, p: float, start: tuple[int, ...]) -> Tensor:
    batch = key.dim() - 1
    ranges = [range(begin, begin + size) for begin, size in zip(start, x.shape[batch:], strict=True)]
    scale = LEVELS / (LEVELS - threshold(p))  # the exact inverse of the kept share: the mean is unbiased
    return torch.where(keep_mask(key, ranges, p), x * scale, 0)


class _Dropout(torch.autograd.Function):
    """The map is linear in x with a mask known from the key, so backward is forward on the gradient."""

    @staticmethod
    def forward(x: Tensor, key: Tensor, p: float, start: tuple[int, ...]) -> Tensor:
        return _apply(x, key, p, start)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, key, ctx.p, ctx.start = inputs
        ctx.save_for_backward(key)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (key,) = ctx.saved_tensors
        return _apply(grad, key, ctx.p, ctx.start), None, None, None


def dropout(x: Tensor, key: Tensor, p: float, start: Sequence[int] | None = None) -> Tensor:
    """Zero each element with probability `p` (rounded to a multiple of 2^-16) and scale the others to keep the mean.

    x: `[*batch, *rest]`, key: int64 `[*batch, 2]`, a key for each batch entry (a sample); the mask of an entry depends
    on its key and on the index within `rest` alone. `rest` has 1 to 4 dimensions. `start`: global index in `rest` of
    x's first element, zeros by default.
    """
    if p == 0:
        return x
    rest = x.dim() - key.dim() + 1
    start = tuple(start) if start is not None else (0,) * rest
    if rest == 2 and key.dim() == 2 and start[-1] % LANES == 0 and has_triton(x):
        return torch.ops.dtgpt.dropout(x, key, p, list(start))
    if torch.compiler.is_compiling():
        # The compiler's partitioner would rather save the mask than draw it again; checkpoint tells it not to. It
        # saves no more than _Dropout does, since the gradient needs the key but not x.
        return checkpoint(_apply, x, key, p, start, use_reentrant=False, preserve_rng_state=False)
    return _Dropout.apply(x, key, p, start)


def dropout_keys(key: Tensor, sample_ids: Tensor, sites: int) -> Tensor:
    """Keys int64 `[B, sites, 2]` of every dropout site for the samples `sample_ids [B]`; `key [2]` is of a step.

    A mask depends on which sample of the run it belongs to, never on its place in a micro-batch.
    """
    if has_triton(key):
        from dtgpt.ops.dropout_kernels import launch_keys

        return launch_keys(key, sample_ids, sites)
    return fold(key, sample_ids[:, None], torch.arange(sites, device=key.device))


@torch.library.custom_op("dtgpt::dropout", mutates_args=())
def _fast(x: Tensor, key: Tensor, p: float, start: list[int]) -> Tensor:
    if not has_triton(x):
        return _apply(x, key, p, tuple(start))
    from dtgpt.ops.dropout_kernels import launch_dropout

    return launch_dropout(x.contiguous(), key, threshold(p), LEVELS / (LEVELS - threshold(p)), start)


@_fast.register_fake
def _(x: Tensor, key: Tensor, p: float, start: list[int]) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:
    _, key, ctx.p, ctx.start = inputs
    ctx.save_for_backward(key)


def _backward(ctx, grad: Tensor):
    (key,) = ctx.saved_tensors
    return torch.ops.dtgpt.dropout(grad, key, ctx.p, ctx.start), None, None, None


_fast.register_autograd(_backward, setup_context=_save)


class Dropout(nn.Module):
    """A dropout site. Keys int64 `[B, S, 2]` are those of S sites, of which this one has the given `index`; no keys
    (evaluation) means identity.

    `start` is set by a plan that hands this module a shard: the global index of the shard's first element.
    """

    def __init__(self, p: float, index: int = 0):
        super().__init__()
        self.p, self.index = p, index
        self.start: tuple[int, ...] | None = None

    def site(self, keys: Tensor | None) -> Site:
        """Return (key, p) or (key, p, start) for an operation that applies this dropout itself; the key is None where
        nothing drops."""
        key = None if keys is None or self.p == 0 else keys[:, self.index]
        return (key, self.p) if self.start is None else (key, self.p, self.start)

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        return x if keys is None else dropout(x, keys[:, self.index], self.p, self.start)

    def extra_repr(self) -> str:
        return f"p={self.p}" + (f", start={self.start}" if self.start else "")

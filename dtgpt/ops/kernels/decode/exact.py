"""Transformer blocks for one token each of M sequences, with the bits that training's forward pass has for the token.

Norms and rotary positions are training's own kernels, whose rows do not depend on their number. Matrix products sum K
in one chain of tensor-core operations, as cuBLAS does wherever it does not split K, and are rounded where training
rounds them. Attention goes over the tiles of keys that the flash kernel takes, in its order.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from dtgpt.ops.kernels.attention.cached import exact_attention
from dtgpt.ops.kernels.decode.blocks import product
from dtgpt.ops.kernels.decode.weights import BlockWeights, HeadWeights, Rotary

NONE: Mapping[int, int] = {}


class Stream(NamedTuple):
    """A residual stream, whose last branch is still to be added."""

    x: Tensor  # [M, H]
    branch: Tensor | None = None  # [M, H]
    bias: Tensor | None = None  # [H], of the branch

    def normed(self, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """Return (sum, its norm), `[M, H]` each; bias None: an RMSNorm."""
        total, normed = self._norm(weight, bias, eps)
        assert normed is not None  # there is a weight
        return self.x if total is None else total, normed

    def whole(self) -> Tensor:
        """Return the sum `[M, H]`."""
        total, _ = (self.x, None) if self.branch is None else self._norm(None, None, 0.0)
        assert total is not None  # there is a branch
        return total

    def _norm(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor | None, Tensor | None]:
        from dtgpt.ops.kernels import norm_kernels as kernels  # imported on first use, since it needs Triton

        arguments = self.x, self.branch, self.bias, weight, bias, eps
        launch = kernels.A_ROW if self.x.shape[-1] >= kernels.FILLS_A_WARP else None  # None: as in training
        return kernels.norm_forward(*arguments, key=None, p=0.0, start=(0, 0), launch=launch)[:2]


def run_blocks(
    x: Tensor,
    blocks: Sequence[BlockWeights],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    slots: Tensor,
    positions: Tensor,
    add: Callable[[Tensor], Tensor] | None = None,
    pieces: Mapping[int, int] = NONE,
) -> Stream:
    """Return the residual stream `[M, H]` after `blocks`, from x `[M, H]`, and write the new tokens' k and v. add: from
    addends `[M, H]` of tensor-parallel ranks their sum, rounded as training rounds it. pieces: of the sums of matrices,
    by the identity of these, where they have several. Other arguments are those of
    `dtgpt.ops.kernels.decode.blocks.run_blocks`."""

    def branch(x: Tensor, weight: Tensor) -> Tensor:
        part = product(x, weight, None, "plain", exact=True, pieces=pieces.get(id(weight), 1))
        return part if add is None else add(part)

    stream = Stream(x)
    for block, k, v in zip(blocks, keys, values, strict=True):
        x, h = stream.normed(block.norm_1, block.norm_1_bias, block.eps)
        packed = product(h, block.qkv, block.qkv_bias, "plain", exact=True)
        packed = packed.view(len(h), k.shape[1], -1, block.head_dim)
        heads = exact_attention(*_turned(packed, block.rotary, positions), k, v, slots, positions).flatten(1)
        stream = Stream(x, branch(heads, block.proj), block.proj_bias)
        x, h = stream.normed(block.norm_2, block.norm_2_bias, block.eps)
        inner = product(h, block.fc, block.fc_bias, str(block.activation), exact=True)
        stream = Stream(x, branch(inner, block.out), block.out_bias)
    return stream


def _turned(packed: Tensor, rotary: Rotary | None, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q `[M, N_kv, R, D]`, k and v `[M, N_kv, D]` of packed `[M, N_kv, R + 2, D]`, rotated where heads are."""
    if rotary is None:
        return packed[:, :, :-2], packed[:, :, -2], packed[:, :, -1]
    from dtgpt.ops.kernels.rotary_kernels import rotary_forward  # imported on first use, since it needs Triton

    q, k, v = rotary_forward(packed[None], positions[None], *rotary)
    return q[0].unflatten(1, (packed.shape[1], -1)), k[0], v[0]


def run_head(stream: Stream, head: HeadWeights) -> Tensor:
    """Return logits `[M, V]` in the type of the activations, to which training rounds them."""
    _, h = stream.normed(head.norm, head.norm_bias, head.eps)
    return product(h, head.table, None, "plain", exact=True)

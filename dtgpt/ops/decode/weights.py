"""The weights of a model as decode kernels read them: all of one 16-bit dtype, matrices `[out, in]`."""

from typing import NamedTuple

from torch import Tensor


class EmbeddingWeights(NamedTuple):
    """Tables of tokens and of learned positions, whose rows are added."""

    tokens: Tensor  # [V, H]
    positions: Tensor  # [P, H]


class BlockWeights(NamedTuple):
    """A pre-norm block of GPT-2's kind: LayerNorm, attention, LayerNorm, two matrices with a tanh-GELU between them.

    Under tensor parallelism each rank has its own heads and its own part of F.
    """

    norm_1: Tensor  # [H]
    norm_1_bias: Tensor  # [H]
    qkv: Tensor  # [N_kv (R + 2) D, H]: for each head of k and v its R heads of q, then k, then v
    qkv_bias: Tensor
    proj: Tensor  # [H, N D]
    proj_bias: Tensor  # [H]
    norm_2: Tensor  # [H]
    norm_2_bias: Tensor  # [H]
    fc: Tensor  # [F, H]
    fc_bias: Tensor  # [F]
    out: Tensor  # [H, F]
    out_bias: Tensor  # [H]
    eps: float  # of both norms
    head_dim: int  # D


class HeadWeights(NamedTuple):
    """The last LayerNorm and the output projection."""

    norm: Tensor  # [H]
    norm_bias: Tensor  # [H]
    table: Tensor  # [V, H]
    eps: float

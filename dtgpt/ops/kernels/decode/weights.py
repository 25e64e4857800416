"""The weights of a model as decode kernels read them: all of one 16-bit dtype, matrices `[out, in]`."""

from typing import NamedTuple

from torch import Tensor

from dtgpt.ops.experts.routing import Routing


class EmbeddingWeights(NamedTuple):
    """Tables of tokens and of learned positions, whose rows are added."""

    tokens: Tensor  # [V, H]
    positions: Tensor | None  # [P, H]; None: the blocks rotate positions


class Rotary(NamedTuple):
    """Rotary positions of q and k, after an RMSNorm of each head where the model has these."""

    table: Tensor  # fp32 [2, P, D / 2]: cosine and sine of `dtgpt.ops.rotary_positions.angle_table`
    q_norm: Tensor | None = None  # [D]; None: no norm
    k_norm: Tensor | None = None
    eps: float = 0.0  # of these norms

    def normalises(self) -> bool:
        """Return whether heads of q or k are normalised."""
        return self.q_norm is not None or self.k_norm is not None


class RouterWeights(NamedTuple):
    """What chooses the experts of a token, by a softmax."""

    weight: Tensor  # [E, H]
    bias: Tensor | None  # [E]
    rule: Routing


class BlockWeights(NamedTuple):
    """A pre-norm block: norm, attention, norm, MLP of two matrices, or with a router two stacks of them. Where the
    biases of the norms are None, they are RMSNorms; else LayerNorms.

    Under tensor parallelism each rank has its own heads and its own part of F.
    """

    norm_1: Tensor  # [H]
    norm_1_bias: Tensor | None  # [H]
    qkv: Tensor  # [N_kv (R + 2) D, H]: for each head of k and v its R heads of q, then k, then v
    qkv_bias: Tensor | None
    proj: Tensor  # [H, N D]
    proj_bias: Tensor | None  # [H]
    norm_2: Tensor  # [H]
    norm_2_bias: Tensor | None  # [H]
    fc: Tensor  # [F, H]; of "swiglu" [2 F, H]: gate 0, up 0, gate 1, up 1, ...; of experts [E, 2 F, H]
    fc_bias: Tensor | None
    out: Tensor  # [H, F]; of experts [E, H, F]
    out_bias: Tensor | None  # [H]
    eps: float  # of both norms
    head_dim: int  # D
    activation: str | None = "gelu"  # or "swiglu"; of experts a name of a gate's; None: kernels do not know it
    rotary: Rotary | None = None  # None: positions are learned
    router: RouterWeights | None = None  # None: one MLP
    # The norms in `rotary` are of all heads together, [N D] and [N_kv D], and q, k and v are bounded by this, 0: not.
    joint: float | None = None


class HeadWeights(NamedTuple):
    """The last norm, an RMSNorm where its bias is None, and the output projection."""

    norm: Tensor  # [H]
    norm_bias: Tensor | None  # [H]
    table: Tensor  # [V, H]
    eps: float

"""Modules that architectures share. Each owns its fusion, so that a model file shows the transformer alone.

A module computes in the dtype of its input, leaves a bias or a sum to the operation that comes next where one pass over
the data saves another, and reads in its `bound` what a plan, a precision or a cache gives it (`binding.py`)."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dtgpt.models.binding import PLAIN, Binding, BoundModule
from dtgpt.ops.attention.core import AttentionRule, causal_attention
from dtgpt.ops.linear import linear
from dtgpt.ops.loss.cross_entropy import capped
from dtgpt.ops.loss.head import head_loss
from dtgpt.ops.norms import norm, norm_and_pass, residual, residual_norm, row_sums
from dtgpt.ops.random.dropout import Site, dropout
from dtgpt.util.torch_private import is_dtensor

NO_DROPOUT: Site = (None, 0.0)
LossWeights = Tensor | tuple[Tensor | None, ...] | None  # what a head hands on to `Output`


class Sharing(Protocol):
    """How samples share the tokens of a row."""

    def attend(self, attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return, for rows of tokens, what `attention` returns for samples."""


Seen = Tensor | Sharing | None  # int32 [B, T, 2], bounds of documents; or samples that share the tokens of a row


class Context(NamedTuple):
    """What a block knows of a batch beside its activations; None changes nothing."""

    dropout_keys: Tensor | None = None  # int64 [B, S, 2] of this block's S sites
    positions: Tensor | None = None  # int64 [B, T]
    seen: Seen = None  # of what tokens may attend to, but for causality


class Branch(NamedTuple):
    """The output of a residual branch, whose bias the following operation adds."""

    product: Tensor  # [B, T, H]
    bias: Tensor | None  # [H]


class Linear(nn.Linear):
    """A linear map that computes in the dtype of its input; the weight may be an fp32 master."""

    bound: Binding = PLAIN
    adds_bias: ClassVar[bool] = True

    def forward(self, x: Tensor) -> Tensor:
        # Integers are codes, for the product that is bound.
        weight = self.weight.to(x.dtype) if self.weight.is_floating_point() else self.weight
        bias = self.bias.to(x.dtype) if self.adds_bias and self.bias is not None else None
        if self.bound.quantised is not None:
            return self.bound.quantised.linear(self.bound, x, weight, bias)
        if self.bound.product is not None:
            return self.bound.product(x, weight, bias)
        return linear(x, weight, bias)


class DeferredBiasLinear(Linear):
    """A `Linear` that leaves its bias to the following operation, which adds it on the way."""

    adds_bias = False


def mlp(x: Tensor, first: Linear, second: DeferredBiasLinear, activation: Callable[..., Tensor]) -> Tensor:
    """Return second(activation(first(x))), or with first.bias, which first leaves to the activation, as its second
    argument. Products of fewer bits may compute all of it at once."""
    if first.bound.quantised is not None:
        whole = first.bound.quantised.mlp(x, first, second, activation)
        if whole is not None:
            return whole
    bias = () if first.bias is None else (first.bias,)
    return second(row_sums().activated(activation, second.weight.shape[1], first(x), *bias))


class Table(nn.Embedding):
    """The rows of tokens, `[B, T]` -> `[B, T, H]`."""

    bound: Binding = PLAIN

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) if self.bound.product is None else self.bound.product(tokens, self.weight)


class LayerNorm(nn.LayerNorm):
    """LayerNorm of the residual stream, fused with the residual sum before it."""

    def forward(  # type: ignore[override]
        self, x: Tensor, branch: Branch | None = None, site: Site = NO_DROPOUT
    ) -> tuple[Tensor, Tensor]:
        """Return (x, norm(x)), each `[B, T, H]`; with a branch (sum, norm(sum)), sum = x + dropout(branch)."""
        if branch is None:
            return norm_and_pass(x, self.weight, self.bias, self.eps)
        return residual_norm(x, *branch, self.weight, self.bias, self.eps, *site)


class FinalNorm(nn.LayerNorm):
    """LayerNorm at the end of the residual stream, `[B, T, H]` -> `[B, T, H]`."""

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """RMSNorm of the residual stream, fused with the residual sum before it."""

    eps: float

    def forward(  # type: ignore[override]
        self, x: Tensor, branch: Branch | None = None, site: Site = NO_DROPOUT
    ) -> tuple[Tensor, Tensor]:
        """Return (x, norm(x)), each `[B, T, H]`; with a branch (sum, norm(sum)), sum = x + dropout(branch)."""
        if branch is None:
            return norm_and_pass(x, self.weight, None, self.eps)
        return residual_norm(x, *branch, self.weight, None, self.eps, *site)


class FinalRMSNorm(nn.RMSNorm):
    """RMSNorm at the end of the residual stream, or of a branch, `[B, T, H]` -> `[B, T, H]`."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, None, self.eps)


def add(x: Tensor, branch: Branch, site: Site) -> Tensor:
    """Return the residual sum x + dropout(branch), `[B, T, H]`."""
    return residual(x, *branch, *site)


class Dropout(nn.Module):
    """A dropout site. Keys int64 `[B, S, 2]` are those of S sites, of which this one has the given `index`; no keys
    (evaluation) means identity."""

    bound: Binding = PLAIN

    def __init__(self, p: float, index: int = 0):
        super().__init__()
        self.p, self.index = p, index

    def site(self, keys: Tensor | None) -> Site:
        """Return (key, p) or (key, p, start) for an operation that applies this dropout itself; the key is None where
        nothing drops."""
        key, start = None if keys is None or self.p == 0 else keys[:, self.index], self.bound.start
        return (key, self.p) if start is None else (key, self.p, start)

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        return x if keys is None else dropout(x, keys[:, self.index], self.p, self.bound.start)

    def extra_repr(self) -> str:
        return f"p={self.p}" + (f", start={self.bound.start}" if self.bound.start else "")


class PreNormBlock(BoundModule):
    """x `[B, T, H]` -> `[B, T, H]`: x = x + dropout(attn(norm(x))), then x = x + dropout(mlp(norm(x))), by RMSNorm."""

    def __init__(self, hidden_size: int, eps: float, dropout: float, attn: nn.Module, mlp: nn.Module):
        """attn: (`[B, T, H]`, context) -> Branch; mlp: `[B, T, H]` -> Branch."""
        super().__init__()
        self.norm_1 = RMSNorm(hidden_size, eps=eps)
        self.attn: Any = attn
        self.drop_1 = Dropout(dropout, index=1)
        self.norm_2 = RMSNorm(hidden_size, eps=eps)
        self.mlp: Any = mlp
        self.drop_2 = Dropout(dropout, index=2)

    def compute(self, x: Tensor, context: Context) -> Tensor:
        keys = context.dropout_keys
        x, h = self.norm_1(x)
        x, h = self.norm_2(x, self.attn(h, context), self.drop_1.site(keys))
        return add(x, self.mlp(h), self.drop_2.site(keys))


class AttentionCore(BoundModule):
    """Causal attention without its projections. The plan's build sets the back end, inference the cache.

    window: a query sees that many tokens, its own the last; None: all up to its own. sinks: the number of heads, where
    each has a learned logit that takes part in its softmax without a value; the core then is a module of the role
    `SINKS`, with one parameter `[N]`. softcap: scores s become c tanh(s / c), c being this. scale: factor of q k^T;
    None: 1 / sqrt(D). Blocks that differ in one of these are of different kinds (`ModelConfig.block_kind`). heads:
    (N_kv, D) of what the block gives the core, where it says so; None: `models.inventory` measures them.
    """

    def __init__(
        self,
        window: int | None = None,
        sinks: int = 0,
        softcap: float | None = None,
        scale: float | None = None,
        heads: tuple[int, int] | None = None,
    ):
        super().__init__()
        self.heads = heads
        self.window, self.softcap, self.scale = window, softcap, scale
        self.sinks = nn.Parameter(torch.empty(sinks)) if sinks else None

    def compute(self, q: Tensor, k: Tensor, v: Tensor, site: Site, seen: Seen, first_head: int | None = None) -> Tensor:
        """Return `[B, T, N, D]` from q `[B, T, N, D]` and k, v `[B, S, N_kv, D]`, S >= T. first_head: the head of this
        rank's parameters that is the first of q, where context parallelism gives some heads only."""
        if seen is not None and not isinstance(seen, Tensor):
            return seen.attend(lambda q, k, v: self.compute(q, k, v, site, None, first_head), q, k, v)
        sinks: Tensor | None = self.sinks
        if sinks is not None:
            local = sinks.to_local() if is_dtensor(sinks) else sinks
            own = slice(None) if first_head is None else slice(first_head, first_head + q.shape[2])
            sinks = local[own].to(q.dtype)
        rule = AttentionRule(self.window, self.softcap, self.scale, sinks)
        if self.bound.cache is not None:
            return self.bound.cache.attend(q, k, v, rule)
        options: dict[str, Any] = {"spans": seen, "backend": self.bound.backend, "rule": rule}
        return causal_attention(q, k, v, *site, **options)


class Output(nn.Linear):
    """The output projection, and the loss after it.

    `bound.gradient_scale` multiplies the gradient of the loss: the weight of a micro-batch, and the loss scale of fp16.
    The loss itself stays as it is. `cap` bounds the logits softly (`dtgpt.ops.loss.cross_entropy.capped`); 0: not.
    """

    bound: Binding = PLAIN

    def __init__(self, hidden_size: int, padded_vocab_size: int, vocab_size: int, bias: bool = False, cap: float = 0.0):
        super().__init__(hidden_size, padded_vocab_size, bias=bias)
        self.vocab_size, self.cap = vocab_size, cap

    def forward(self, x: Tensor, targets: Tensor | None = None, loss_weights: LossWeights = None) -> Tensor:
        """Return logits `[B, T, V]` or, with targets `[B, T]`, the mean over them of loss times weight `[B, T]`, or
        what the loss that is bound makes of them."""
        weight, bias = self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        if self.bound.through is not None:
            weight = self.bound.through(weight)
        if targets is None:
            return capped(linear(x, weight, bias), self.cap)
        if self.bound.loss is not None:
            return self.bound.loss(self, x, weight, bias, targets, loss_weights)
        assert not isinstance(loss_weights, tuple)
        return head_loss(
            x,
            weight,
            targets,
            self.vocab_size,
            scale=self.bound.gradient_scale,
            weights=loss_weights,
            bias=bias,
            cap=self.cap,
        )

"""Losses that keep experts evenly used, by their gradients with respect to the logits of a router.

Probabilities p are the softmax of the logits, or their sigmoids divided by the sum of these: without the division a
router could lower all scores at once to make the loss small. Loads are whole numbers, which no gradient passes.

    of a batch      E sum_e f_e P_e       f_e: choices of e for each token, P_e: mean of p_e (Fedus et al. 2021, with
                                          the factor k of transformers' load_balancing_loss_func)
    of a sequence   E / k sum_e f_e P_e   both of one sample (DeepSeek-AI 2024, DeepSeek-V3, equations 17 to 20)
    z-loss          (log sum_e exp(logit_e))^2, mean over tokens (Zoph et al. 2022)

Shapes: B samples, T tokens of each, E experts. `counted` is 1 for tokens that count, 0 for padding, `[B, T, 1]`.
"""

import torch
from torch import Tensor

from dtgpt.ops.experts.routing import Score


def probabilities(logits: Tensor, score: Score) -> Tensor:
    """Return the part of each expert in a token's scores, `[B, T, E]`."""
    if score != "sigmoid":
        return logits.softmax(-1)
    own = logits.sigmoid()
    return own / own.sum(-1, keepdim=True)


def through(probability: Tensor, logits: Tensor, score: Score, gradient: Tensor) -> Tensor:
    """Return the gradient of logits, of that of their probabilities."""
    made = probability * (gradient - (gradient * probability).sum(-1, keepdim=True))
    return made if score != "sigmoid" else made * (-logits).sigmoid()


def chosen_of(experts: Tensor, logits: Tensor, counted: Tensor) -> Tensor:
    """Return 1 for each choice of a token that counts, `[B, T, E]` in the type of the logits, from the experts int64
    `[B, T, k]` of each token."""
    return torch.zeros_like(logits).scatter_(-1, experts, 1.0) * counted


def sequence_loads(chosen: Tensor, tokens: Tensor, chosen_each: int) -> tuple[Tensor, Tensor]:
    """Return E / k times the part of a sample's tokens that chose each expert, and one through the number of these
    tokens, `[B, 1, E]` and `[B, 1, 1]`; 0 where none counts. chosen, tokens: both counts, of these shapes."""
    each = torch.where(tokens > 0, 1 / tokens.clamp(min=1), 0.0)
    return chosen * each * (chosen.shape[-1] / chosen_each), each


def token_weights(loss_weights: Tensor | None, by_token: Tensor | None) -> Tensor | None:
    """Return what is not 0 for a token that has a loss, `[B, T]`; None: that is not known. by_token: where weights are
    those of addends of the loss, bool `[B, T, ..]`, of which a token is part; of another type it does not say so."""
    if by_token is None:
        return loss_weights
    return by_token[..., None].flatten(2).any(-1) if by_token.dtype == torch.bool else None


def counted_tokens(document_bounds: Tensor | None, weights: Tensor | None) -> Tensor | None:
    """Return which tokens count, bool `[B, T]`; None: all. What fills a sample is a document of its own in which no
    token has a loss. weights: as of `token_weights`."""
    if document_bounds is None or weights is None:
        return None
    sums = torch.nn.functional.pad((weights > 0).long().cumsum(1), (1, 0))  # [B, T + 1]
    first, end = document_bounds.long().unbind(-1)
    return sums.gather(1, end) > sums.gather(1, first)

"""What happens between gradients and new weights: parameter groups, AdamW, the learning rate, clipping."""

import math

import torch
from torch import Tensor, nn

from dtgpt.recipe import OptimizerConfig, Recipe


def make_optimizer(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over fp32 parameters, which are the master weights: matrices decay, biases and norms do not."""
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def learning_rate(step: int, recipe: Recipe) -> float:
    """Of optimizer step `step`, counted from 0: linear warmup to `lr`, then the schedule down to `min_lr`.

    cosine: Loshchilov and Hutter 2017; wsd (warmup, stable, decay): Hu et al. 2024, MiniCPM.
    """
    config, warmup, decay = recipe.optimizer, recipe.warmup_steps, recipe.decay_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = min((step - warmup) / max(decay - warmup, 1), 1.0)
    if config.schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * done))
    elif config.schedule == "linear":
        share = 1 - done
    elif config.schedule == "wsd":
        share = min(1.0, (decay - step) / max(config.wsd_decay * decay, 1))
    else:
        share = 1.0
    return config.min_lr + max(share, 0.0) * (config.lr - config.min_lr)


def clip_gradients(parameters: list[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale the gradients of these parameters down so that the global `norm`, which may count those of other ranks too,
    is at most `limit` (0: leave them). Nothing waits for the device."""
    if limit > 0:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm, foreach=True)

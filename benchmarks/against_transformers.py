"""Our training step of a LLaMA beside that of Hugging Face's transformers on one device, in turns.

    python benchmarks/against_transformers.py --model llama32_1b --micro_batch_size 4

transformers' model computes attention by PyTorch's SDPA under torch.compile; AdamW is PyTorch's fused one. `fp32
masters`: weights in fp32 and autocast to bf16, the same arithmetic as ours. `bf16 weights`: weights, gradients and
moments in bf16, which is less work and less exact. Both see the same tokens; each sums the loss as it does by itself.
"""

import argparse
import sys

import torch
from against import Peer, make_parser, run
from torch import Tensor
from transformers_model import transformers_model

from dtgpt.config.recipe import Recipe
from dtgpt.train.trainer import Trainer

PEERS = {"fp32": ("transformers, fp32 masters", torch.float32), "bf16": ("transformers, bf16 weights", torch.bfloat16)}


class Transformers(Peer):
    def __init__(self, recipe: Recipe, ours: Trainer, dtype: torch.dtype):
        with torch.device(ours.mesh.device):
            model = transformers_model(recipe.model, attn_implementation="sdpa", dtype=dtype)
        own = recipe.optimizer
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": own.weight_decay},
                {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=own.lr, betas=(own.beta1, own.beta2), eps=own.eps, fused=True,
        )  # fmt: skip
        super().__init__(recipe, ours, model, optimizer)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        # transformers shifts labels by itself, unless it gets shifted ones.
        return self.model(input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False).loss


def make_peers(args: argparse.Namespace, recipe: Recipe, ours: Trainer) -> dict[str, Peer]:
    return {name: Transformers(recipe, ours, dtype) for name, dtype in (PEERS[kind] for kind in args.peers)}


def main() -> int:
    parser = make_parser(__doc__, "llama32_1b")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="default: both")
    return run(parser, make_peers)


if __name__ == "__main__":
    sys.exit(main())

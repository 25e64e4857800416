"""Qwen3-30B-A3B (Yang et al. 2025), 30.5 B parameters, of which 3.4 B for each token, in Megatron-LM token files.

hardware   8 H200 (78 GiB on each, as planned), 4 with --micro_batch_size 2 (124 GiB), or 16 or more GPUs of 80 GB
plan       dtgpt plan recipes/qwen3_30b_a3b.py --world 8 --gpu H200
command    torchrun --nproc-per-node 8 recipes/qwen3_30b_a3b.py --data.path tokens_text_document
fine-tune  torchrun --nproc-per-node 8 recipes/qwen3_30b_a3b.py --init_from Qwen3-30B-A3B-Base
           --data.path tokens_text_document --optimizer.lr 1e-5 --optimizer.min_lr 1e-6 --optimizer.warmup 100
           --steps 1000 --global_batch_size 64
short run  ... --steps 20 --optimizer.warmup 2 --global_batch_size 8
expect     not measured yet

The paper does not publish batch and learning rates: those here are OLMo 3's for a model of 32 B.
"""

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, LogConfig, OptimizerConfig
from dtgpt.models.families.qwen3_moe import QWEN3_30B_A3B


def recipe() -> Recipe:
    return Recipe(
        name="qwen3_30b_a3b",
        model=QWEN3_30B_A3B,
        optimizer=OptimizerConfig(lr=3e-4, min_lr=3e-5, warmup=2000, weight_decay=0.1, beta1=0.9, beta2=0.95, clip=1.0),
        plan="zero3",
        recompute="full",
        steps=500_000,
        micro_batch_size=8,
        global_batch_size=1024,  # of 4096 tokens each: 4,194,304 tokens
        log=LogConfig(interval=10, eval_interval=1000, eval_samples=512),
        checkpoint=CheckpointConfig(interval=1000),
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)

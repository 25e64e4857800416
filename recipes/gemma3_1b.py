"""Gemma 3 1B: a window of 512 tokens in five of six blocks, from scratch or from its weights.

hardware   one GPU of 80 GB or more
plan       dtgpt plan recipes/gemma3_1b.py --gpu H100
command    torchrun --nproc-per-node 8 recipes/gemma3_1b.py --data.path tokens_text_document
fine-tune  python recipes/gemma3_1b.py --init_from gemma-3-1b-pt --data.path tokens_text_document
           --optimizer.lr 1e-5 --optimizer.min_lr 1e-6 --optimizer.warmup 100 --steps 1000
           --global_batch_size 16
short run  python recipes/gemma3_1b.py --steps 50 --optimizer.warmup 5 --log.interval 5 --global_batch_size 8
expect     the full run was not tried
measured   76,323 tokens/s on one H200 with 2 samples a pass, MFU 49.9 % (docs/benchmarks.md)

Samples of 4096 tokens. Batch and learning rates of Gemma 3 (Gemma Team 2025) are not published; those here are of
TinyLlama 1.1B (Zhang et al. 2024), with half of its batch. docs/models.md tells what the model has.
"""

from dataclasses import replace

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, LogConfig, OptimizerConfig
from dtgpt.models.families.gemma3 import GEMMA3_1B


def recipe() -> Recipe:
    return Recipe(
        name="gemma3_1b",
        model=replace(GEMMA3_1B, seq_length=4096),
        optimizer=OptimizerConfig(
            lr=4e-4,
            min_lr=4e-5,
            schedule="cosine",
            warmup=2000,
            weight_decay=0.1,
            beta1=0.9,
            beta2=0.95,
            clip=1.0,
        ),
        steps=500_000,
        micro_batch_size=2,
        global_batch_size=256,  # of 4096 tokens each: 1,048,576 tokens
        log=LogConfig(interval=10, eval_interval=1000, eval_samples=256, sample_interval=10_000),
        checkpoint=CheckpointConfig(interval=1000),
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)

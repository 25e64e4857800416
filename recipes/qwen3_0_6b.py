"""Qwen3 0.6B: the published model, which normalises the heads of queries and keys, from scratch or from its weights.

hardware   one GPU of 40 GB or more
plan       dtgpt plan recipes/qwen3_0_6b.py --gpu H100
command    torchrun --nproc-per-node 8 recipes/qwen3_0_6b.py --data.path tokens_text_document
fine-tune  python recipes/qwen3_0_6b.py --init_from Qwen3-0.6B --data.path tokens_text_document
           --optimizer.lr 1e-5 --optimizer.min_lr 1e-6 --optimizer.warmup 100 --steps 1000
           --global_batch_size 16
short run  python recipes/qwen3_0_6b.py --steps 50 --optimizer.warmup 5 --log.interval 5 --global_batch_size 8
expect     22.2 GiB on one H200. The full run was not tried.

Samples of 4096 tokens as in the first stage of Qwen3's training (Yang et al. 2025); its batch and learning rates are
not published. Those here are of TinyLlama 1.1B (Zhang et al. 2024), with half of its batch. docs/models.md tells how to
prepare a text with the model's tokenizer.
"""

from dataclasses import replace

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, LogConfig, OptimizerConfig
from dtgpt.models.llama import QWEN3_0_6B


def recipe() -> Recipe:
    return Recipe(
        name="qwen3_0_6b",
        model=replace(QWEN3_0_6B, seq_length=4096),
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

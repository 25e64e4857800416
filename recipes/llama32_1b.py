"""Llama 3.2 1B: the published model, trained from scratch or from its published weights.

hardware   one GPU of 40 GB or more
plan       dtgpt plan recipes/llama32_1b.py --world 8 --gpu H100
command    torchrun --nproc-per-node 8 recipes/llama32_1b.py --data.path tokens_text_document
fine-tune  python recipes/llama32_1b.py --init_from Llama-3.2-1B --data.path tokens_text_document
           --optimizer.lr 1e-5 --optimizer.min_lr 1e-6 --optimizer.warmup 100 --steps 1000
           --global_batch_size 16
short run  python recipes/llama32_1b.py --steps 50 --optimizer.warmup 5 --log.interval 5 --global_batch_size 8
expect     38.3 GiB with --micro_batch_size 4 --global_batch_size 4, and 32.5 GiB as it is. The full run was not tried.
measured   66,248 tokens/s on one H200 with --micro_batch_size 4 --global_batch_size 4, MFU 60.5 % (docs/benchmarks.md)

Meta pruned the model from Llama 3.1 8B and has not published how it was trained. Batch and optimizer are those of
TinyLlama 1.1B (Zhang et al. 2024): 2 million tokens a step, 4e-4 to 4e-5. docs/models.md tells how to prepare a text
with the model's tokenizer.
"""

from dataclasses import replace

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, LogConfig, OptimizerConfig
from dtgpt.models.llama import LLAMA32_1B


def recipe() -> Recipe:
    return Recipe(
        name="llama32_1b",
        model=replace(LLAMA32_1B, seq_length=4096),
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
        global_batch_size=512,  # of 4096 tokens each: 2,097,152 tokens
        log=LogConfig(interval=10, eval_interval=1000, eval_samples=256, sample_interval=10_000),
        checkpoint=CheckpointConfig(interval=1000),
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)

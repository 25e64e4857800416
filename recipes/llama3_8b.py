"""Llama 3 8B with the published hyperparameters (Dubey et al. 2024, section 3.4 and table 3), from scratch or from its
weights.

hardware   8 GPUs of 80 GB, or 2 of 141 GB
plan       dtgpt plan recipes/llama3_8b.py --world 8 --gpu H100
command    torchrun --nproc-per-node 8 recipes/llama3_8b.py --data.path tokens_text_document
two GPUs   the same with --nproc-per-node 2, or with --plan tp2_sp
fine-tune  the same with --init_from Meta-Llama-3-8B --optimizer.lr 1e-5 --optimizer.warmup 100 --steps 1000
expect     84.5 GiB on two H200 with --global_batch_size 2 by NCCL (85.3 by copy engines, as planned), 15 GiB more with
           several micro-batches; 58 GiB on each of 8 GPUs, as planned. The full run was not tried.
measured   9,201 tokens/s on one H200 with --recompute around_attention, 120.0 GiB; on two with --global_batch_size 2
           10,398 tokens/s a GPU, 85.35 GiB; under tp2_sp with one sample 9,730, 73.24 GiB (docs/benchmarks.md)

8000 steps of warmup to 3e-4, then a cosine to a hundredth of that over 1,200,000 steps. The paper begins with batches
of 4 million tokens in samples of 4096, and goes on with 8 million in samples of 8192; here all steps have 4 million in
samples of 8192. Weight decay and the betas are those of Llama 2 (Touvron et al. 2023, section 2.2).
"""

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, LogConfig, OptimizerConfig
from dtgpt.models.llama import LLAMA3_8B


def recipe() -> Recipe:
    return Recipe(
        name="llama3_8b",
        model=LLAMA3_8B,
        plan="zero3",
        optimizer=OptimizerConfig(
            lr=3e-4,
            min_lr=3e-6,
            schedule="cosine",
            warmup=8000,
            weight_decay=0.1,
            beta1=0.9,
            beta2=0.95,
            clip=1.0,
        ),
        steps=1_200_000,
        micro_batch_size=1,
        global_batch_size=512,  # of 8192 tokens each: 4,194,304 tokens
        log=LogConfig(interval=10, eval_interval=1000, eval_samples=256, sample_interval=10_000),
        checkpoint=CheckpointConfig(interval=1000),
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)

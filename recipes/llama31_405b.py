"""Llama 3.1 405B: the published model and hyperparameters (Dubey et al. 2024, section 3.4 and tables 3 and 4).

hardware   2048 nodes of 8 GPUs of 80 GB, or fewer under another plan: docs/scale.md compares them
plan       dtgpt plan recipes/llama31_405b.py --world 16384 --gpu H100
one rank   dtgpt plan recipes/llama31_405b.py --world 16384 --rank 5000 --gpu H100
command    sbatch --nodes 2048 recipes/slurm.sbatch recipes/llama31_405b.py --data.path tokens_text_document
expect     28 GiB on each rank and a bubble of 19 %, as planned. Neither the full run nor a step of this size was
           tried.

8000 steps of warmup to 8e-5, then a cosine to a hundredth of that over 1,200,000 steps. The paper begins with batches
of 4 million tokens in samples of 4096, goes on with 8 million in samples of 8192 after 252 million tokens, and with 16
million after 2.87 trillion; here all steps have 16 million in samples of 8192. Rotary positions have Llama 3.1's
scaling from the start. Weight decay and the betas are those of Llama 2 (Touvron et al. 2023, section 2.2).
"""

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, LogConfig, OptimizerConfig
from dtgpt.models.llama import LLAMA31_405B


def recipe() -> Recipe:
    return Recipe(
        name="llama31_405b",
        model=LLAMA31_405B,
        plan="tp8_sp_pp16_interleaved4_zero1",
        recompute="full",
        optimizer=OptimizerConfig(
            lr=8e-5,
            min_lr=8e-7,
            schedule="cosine",
            warmup=8000,
            weight_decay=0.1,
            beta1=0.9,
            beta2=0.95,
            clip=1.0,
        ),
        steps=1_200_000,
        micro_batch_size=1,
        global_batch_size=2048,  # of 8192 tokens each: 16,777,216 tokens
        log=LogConfig(interval=10, eval_interval=1000, eval_samples=2048),
        checkpoint=CheckpointConfig(interval=1000),
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)

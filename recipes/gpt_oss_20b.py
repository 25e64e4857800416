"""GPT-OSS-20B (Agarwal et al. 2025), 20.9 B parameters, of which 4.2 B for each token, from the published weights.

hardware   8 GPUs of 141 GB (56 GiB on each, as planned), or of 80 GB with --micro_batch_size 2 (54 GiB)
plan       dtgpt plan recipes/gpt_oss_20b.py --world 8 --gpu H200
command    torchrun --nproc-per-node 8 recipes/gpt_oss_20b.py --init_from gpt-oss-20b --data.path tokens_text_document
write      dtgpt convert runs/gpt_oss_20b-001 trained --to hf --dtype bf16
short run  ... --steps 20 --optimizer.warmup 2 --global_batch_size 8
expect     not measured yet

The published files have experts of 4 bits (MXFP4), which are read; written are 16 bits. Batch and learning rates are
for fine-tuning all weights; the paper does not publish those of pre-training.
"""

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, LogConfig, OptimizerConfig
from dtgpt.models.families.gpt_oss import GPT_OSS_20B


def recipe() -> Recipe:
    return Recipe(
        name="gpt_oss_20b",
        model=GPT_OSS_20B,
        optimizer=OptimizerConfig(lr=1e-5, min_lr=1e-6, warmup=100, weight_decay=0.1, beta1=0.9, beta2=0.95, clip=1.0),
        plan="zero3",
        recompute="full",
        steps=1000,
        micro_batch_size=8,
        global_batch_size=64,  # of 4096 tokens each: 262,144 tokens
        log=LogConfig(interval=10, eval_interval=100, eval_samples=128),
        checkpoint=CheckpointConfig(interval=500),
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)

"""OLMoE-1B-7B (Muennighoff et al. 2024), 6.9 B parameters, of which 1.3 B for each token, in Megatron-LM token files.

hardware   one H200, or two or more GPUs of 80 GB with --plan zero3
plan       dtgpt plan recipes/olmoe_1b_7b.py --world 1 --gpu H200
command    torchrun --nproc-per-node 8 recipes/olmoe_1b_7b.py --plan zero3 --data.path tokens_text_document
fine-tune  torchrun --nproc-per-node 8 recipes/olmoe_1b_7b.py --plan zero3 --init_from OLMoE-1B-7B-0924
           --data.path tokens_text_document --optimizer.lr 1e-5 --optimizer.min_lr 1e-6 --optimizer.warmup 100
           --steps 1000 --global_batch_size 64
short run  ... --steps 20 --optimizer.warmup 2 --global_batch_size 8
expect     the full run was not tried
measured   53,571 tokens/s on one H200 with 8 micro-batches of 2, --recompute around_attention --recompute_blocks 4,
           132.1 GiB (docs/benchmarks.md)

Batch and learning rates are those of the paper, 4 M tokens a step; docs/moe.md tells what the model has.
"""

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.families.olmoe import OLMOE_1B_7B


def recipe() -> Recipe:
    return Recipe(
        name="olmoe_1b_7b",
        model=OLMOE_1B_7B,
        optimizer=OptimizerConfig(lr=4e-4, min_lr=4e-5, warmup=2000),
        steps=100000,
        micro_batch_size=2,
        global_batch_size=1024,
        recompute="full",
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)

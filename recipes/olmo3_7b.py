"""OLMo 3 7B: a window of 4096 tokens in three of four blocks, from scratch or from its weights.

hardware   8 GPUs of 80 GB
plan       dtgpt plan recipes/olmo3_7b.py --world 8 --gpu H100
command    torchrun --nproc-per-node 8 recipes/olmo3_7b.py --data.path tokens_text_document
fine-tune  torchrun --nproc-per-node 8 recipes/olmo3_7b.py --init_from Olmo-3-1025-7B
           --data.path tokens_text_document --optimizer.lr 1e-5 --optimizer.min_lr 1e-6 --optimizer.warmup 100
           --steps 1000 --global_batch_size 64
longer     ... --model.seq_length 65536 --model.rope_scaling yarn --model.rope_factor 8
short run  ... --steps 20 --optimizer.warmup 2 --global_batch_size 8
expect     not measured yet

Samples of 8192 tokens as in OLMo 3's first stage (Team Olmo 2025). Batch and learning rates are those of Llama 3 8B
(Dubey et al. 2024), not OLMo 3's own. docs/models.md tells what the model has.
"""

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, LogConfig, OptimizerConfig
from dtgpt.models.families.olmo3 import OLMO3_7B


def recipe() -> Recipe:
    return Recipe(
        name="olmo3_7b",
        model=OLMO3_7B,
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
        plan="zero3",
        steps=1_200_000,
        micro_batch_size=1,
        global_batch_size=512,  # of 8192 tokens each: 4,194,304 tokens
        log=LogConfig(interval=10, eval_interval=1000, eval_samples=512),
        checkpoint=CheckpointConfig(interval=1000),
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)

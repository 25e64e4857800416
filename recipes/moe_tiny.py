"""A small mixture of experts on text included in Python: OLMoE's kind, 8 experts in each block, 2 for each token.

hardware   2 CPU cores
command    python recipes/moe_tiny.py
expect     two minutes, loss 6.9 -> 2.1, validation loss 1.59 bits/byte (text of Python 3.11). With one expert of twice
           the width, so that a token meets as many parameters: 1.61

dense      ... --model.num_experts 1 --model.experts_per_token 1 --model.ffn_hidden_size 352
"""

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, LogConfig, OptimizerConfig
from dtgpt.models.families.olmoe import OlmoeConfig


def recipe() -> Recipe:
    return Recipe(
        name="moe_tiny",
        model=OlmoeConfig(
            num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, ffn_hidden_size=176,
            num_experts=8, experts_per_token=2, seq_length=64, vocab_size=1024, tied=True,
        ),
        # The text is short: strong weight decay keeps the model from memorizing it.
        optimizer=OptimizerConfig(lr=3e-3, min_lr=2e-4, warmup=0.05, weight_decay=1.0),
        steps=800,
        micro_batch_size=32,
        global_batch_size=32,
        log=LogConfig(interval=50, eval_interval=200, sample_interval=200),
        checkpoint=CheckpointConfig(interval=400),
    )  # fmt: skip


if __name__ == "__main__":
    run_recipe(recipe, __doc__)

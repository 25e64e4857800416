"""A small GPT-2 on text included in Python: from raw text to a generated sample, on a laptop CPU.

hardware   2 CPU cores
command    python recipes/gpt2_tiny.py
expect     90 seconds, loss 7.0 -> 2.6, validation loss 1.59 bits/byte (text of Python 3.11), and a sample that
           reads like documentation
"""

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, LogConfig
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.optim.muon import MuonConfig


def recipe() -> Recipe:
    return Recipe(
        name="gpt2_tiny",
        model=GPT2Config(num_layers=2, hidden_size=128, num_heads=4, seq_length=64, vocab_size=1024),
        # The text is short: strong weight decay keeps the model from memorizing it.
        optimizer=MuonConfig(
            lr=6e-3,
            embedding_lr=3e-3,
            vector_lr=3e-3,
            min_lr=2e-4,
            warmup=0.05,
            weight_decay=2.0,
            table_weight_decay=1.0,
        ),
        steps=700,
        micro_batch_size=32,
        global_batch_size=32,
        log=LogConfig(interval=50, eval_interval=175, sample_interval=175),
        checkpoint=CheckpointConfig(interval=350),
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)

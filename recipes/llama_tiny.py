"""A small LLaMA on text included in Python: rotary positions, RMSNorm, SwiGLU and grouped queries on a laptop CPU.

hardware   2 CPU cores
command    python recipes/llama_tiny.py
expect     80 seconds, loss 6.9 -> 2.2, validation loss 1.58 bits/byte (text of Python 3.11; gpt2_tiny.py
           with AdamW: 1.63 in the same time), and a sample that reads like documentation
"""

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, LogConfig, OptimizerConfig
from dtgpt.models.llama import LlamaConfig


def recipe() -> Recipe:
    return Recipe(
        name="llama_tiny",
        model=LlamaConfig(
            num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, ffn_hidden_size=352,
            seq_length=64, vocab_size=1024, tied=True,
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

"""A small LLaMA that learns to answer: a base model, chats, and the loss on answers alone, on a laptop CPU.

hardware   2 CPU cores; the extras chat and data
command    python recipes/sft_tiny.py
expect     1 min 39 s, 124 s of CPU time. A base is trained on text included in Python, and chats about days, sums and
           capitals are made. Then the loss on answers falls from 5.3 to 0.13, that of held-out chats to 0.40, and
           samples/ has held-out questions with the model's answers.
talk       dtgpt chat runs/sft_tiny-001 --temperature 0
           > What is the capital of Japan?
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import DataConfig, LogConfig, OptimizerConfig
from dtgpt.models.llama import LlamaConfig

BASE, CHATS = "runs/sft_tiny_base-001", "data/sft_tiny"


def recipe() -> Recipe:
    model = LlamaConfig(num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, ffn_hidden_size=352,
                        seq_length=128, vocab_size=1024, tied=True)  # fmt: skip
    return Recipe(
        name="sft_tiny", model=model, init_from=BASE,
        data=DataConfig(path=f"{CHATS}_chat_document", split="95,5,0"),
        optimizer=OptimizerConfig(lr=2e-3, min_lr=1e-4, warmup=0.05), steps=150, micro_batch_size=16,
        global_batch_size=16, log=LogConfig(interval=25, eval_interval=50, sample_interval=50, sample_tokens=40),
    )  # fmt: skip


def made() -> Recipe:
    """Train the base and make the chats, where they are not there yet, and return the recipe."""
    from dtgpt.posttrain.chats.examples import prepare_examples
    from dtgpt.train.loop import train

    if train(replace(recipe(), name="sft_tiny_base", init_from=None, resume="auto", data=DataConfig(), steps=100)):
        raise KeyboardInterrupt
    prepare_examples(Path(CHATS), Path(BASE) / "tokenizer.json")
    return recipe()


if __name__ == "__main__":
    run_recipe(recipe if "RANK" in os.environ or "--help" in sys.argv else made, __doc__)

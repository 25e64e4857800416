"""A tiny run whose steps last STEP_SECONDS (an environment variable), or as many seconds as the file `pace` of the
working folder says, so that a failure finds it in the middle."""

import os
import time
from pathlib import Path

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, DataConfig, LogConfig, OptimizerConfig
from dtgpt.models.gpt2 import GPT2Config


def recipe() -> Recipe:
    return Recipe(
        name="slow",
        model=GPT2Config(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=257, dropout=0.1),
        optimizer=OptimizerConfig(lr=3e-3, warmup=2),
        steps=40,
        micro_batch_size=2,
        global_batch_size=12,
        device="cpu",
        data=DataConfig(path="text.txt", tokenizer="bytes"),
        log=LogConfig(interval=1, eval_interval=0, sample_tokens=0),
        checkpoint=CheckpointConfig(interval=10),
    )


def slow_down(seconds: str) -> None:
    from dtgpt.train.trainer import Trainer

    take_step, pace = Trainer.train_step, Path("pace")

    def slow_step(self):
        time.sleep(float(pace.read_text() if pace.exists() else seconds))
        return take_step(self)

    Trainer.train_step = slow_step


if __name__ == "__main__":
    slow_down(os.environ.get("STEP_SECONDS", "0"))
    run_recipe(recipe, __doc__)

"""Reinforcement learning on sums: a small model that adds, mostly wrong, learns from rewards alone.

hardware   2 CPU cores
command    python recipes/grpo_arithmetic.py
expect     3 min 39 s, 222 s of user CPU time: 100 steps on sums, then 400 with answers. reward: 0.25 in the first of
           them, 0.49 in steps 51 to 100, 0.72 in 151 to 200, 0.84 in 351 to 400
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import DataConfig, LogConfig, OptimizerConfig
from dtgpt.models.llama import LlamaConfig
from dtgpt.posttrain.grpo.config import GrpoConfig
from dtgpt.train.loop import train


class Sums(GrpoConfig):
    def prompt(self, index: int) -> str:
        return "\n{}+{}=".format(*divmod(37 * index % 100, 10))  # each of 100 sums in turn

    def reward(self, index: int, answer: str) -> float:
        return float(answer == str(sum(divmod(37 * index % 100, 10))))


def recipe(steps: int = 400, lr: float = 1e-3, **changes) -> Recipe:
    return replace(Recipe(
        name="grpo_arithmetic", init_from="runs/sums-001", grpo=Sums(group=16, max_new_tokens=3, stop="\n"),
        model=LlamaConfig(num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn_hidden_size=192,
                          seq_length=8, vocab_size=257), log=LogConfig(eval_interval=0, sample_tokens=0),
        optimizer=OptimizerConfig(lr=lr, schedule="constant", warmup=10, weight_decay=0.0), steps=steps,
        micro_batch_size=256, global_batch_size=256, data=DataConfig(path="runs/sums.txt", tokenizer="bytes"),
    ), **changes)  # fmt: skip


def with_base() -> Recipe:
    Path("runs").mkdir(exist_ok=True)
    Path("runs/sums.txt").write_text("".join(f"\n{i // 10 % 10}+{i % 10}={i // 10 % 10 + i % 10}" for i in range(9999)))
    base = recipe(100, 4e-3, name="sums", init_from=None, grpo=Sums(), resume="auto")  # where it is not there yet
    return sys.exit(1) if train(base) else recipe()


if __name__ == "__main__":
    run_recipe(recipe if "RANK" in os.environ or "--help" in sys.argv else with_base, __doc__)

"""Reinforcement learning on sums: a small model that writes sums, mostly wrong ones, learns from rewards alone.

hardware   2 CPU cores
command    python recipes/grpo_arithmetic.py
expect     NOT MEASURED
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from dtgpt.cli import run_recipe
from dtgpt.config.grpo import GrpoConfig
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import DataConfig, LogConfig, OptimizerConfig
from dtgpt.models.llama import LlamaConfig
from dtgpt.ops.random.philox import fold_words


@dataclass(frozen=True, kw_only=True)
class Sums(GrpoConfig):
    def prompt(self, index: int) -> str:
        a, b = numbers(index)
        return f"\n{a}+{b}="

    def reward(self, index: int, answer: str) -> float:
        return float(answer == str(sum(numbers(index))))


def numbers(index: int) -> list[int]:
    return [word % 10 for word in fold_words(1, "sum", index)]


def recipe(base: str | None = "runs/grpo_arithmetic_base-001") -> Recipe:
    model = LlamaConfig(num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn_hidden_size=192,
                        seq_length=16, vocab_size=257)  # fmt: skip
    return Recipe(
        name="grpo_arithmetic", model=model, init_from=base, grpo=Sums(group=16, max_new_tokens=4, stop="\n"),
        data=DataConfig(path="runs/sums.txt", tokenizer="bytes"), seq_length=8, micro_batch_size=256,
        global_batch_size=256, optimizer=OptimizerConfig(lr=1e-3, schedule="constant", warmup=10, weight_decay=0.0),
        steps=400, log=LogConfig(interval=10, eval_interval=0, sample_tokens=0),
    )  # fmt: skip

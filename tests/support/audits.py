"""Runs with receipts, and audits of them, whose processes are forks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, DataConfig, LogConfig, OptimizerConfig
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.posttrain.grpo.config import GrpoConfig
from dtgpt.receipts.config import ReceiptsConfig
from dtgpt.receipts.recompute import work
from dtgpt.train.loop import train
from tests.support.ranks import pool
from tests.support.runs import change, newest_run


def tiny(folder: Path) -> Recipe:
    """Return a recipe whose steps take milliseconds, with a text in the folder."""
    text = folder / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(2000)))
    return Recipe(
        name="test",
        model=GPT2Config(num_layers=2, hidden_size=32, num_heads=2, seq_length=16, vocab_size=257, dropout=0.1),
        optimizer=OptimizerConfig(lr=1e-2, schedule="constant", warmup=0),
        steps=8,
        micro_batch_size=2,
        global_batch_size=8,
        device="cpu",
        runs=str(folder / "runs"),
        data=DataConfig(path=str(text), tokenizer="bytes"),
    )


class Sums(GrpoConfig):
    def prompt(self, index: int) -> str:
        return f"{index % 9}+{index % 7}="

    def reward(self, index: int, answer: str) -> float:
        return float(len(set(answer)))


def recipe_of_sums(folder: Path, steps: int) -> Recipe:
    """Return a recipe of reinforcement learning."""
    recipe = change(tiny(folder), model={"dropout": 0.0}, steps=steps)
    return replace(recipe, grpo=Sums(group=4, max_new_tokens=3), micro_batch_size=4)


def with_receipts(recipe: Recipe, steps: int, plan: str = "single", parts: int = 2, **values: Any) -> Recipe:
    """Return a recipe of runs with receipts, and a checkpoint of every other step."""
    return replace(recipe, **{
        "steps": steps, "plan": plan, "micro_batch_size": 2,
        "receipts": ReceiptsConfig(on=True, parts=parts), "checkpoint": CheckpointConfig(interval=2, keep_last=0),
        "log": LogConfig(interval=1, eval_interval=0, eval_samples=4, sample_tokens=0), **values,
    })  # fmt: skip


def train_with_receipts(
    recipe: Recipe, steps: int, plan: str = "single", world: int = 1, parts: int = 2, **values: Any
) -> Path:
    """Train, with a checkpoint of every other step, and return the run."""
    recipe = with_receipts(recipe, steps, plan, parts, **values)
    assert (pool().run(world, train, recipe) if world > 1 else [train(recipe)]) == [0] * world
    return newest_run(recipe)


def audited(world: int, words: list[str]) -> dict[str, Any]:
    """Compute steps again as `start_processes` does."""
    assert (pool().run(world, work, words) if world > 1 else [work(words)]) == [0] * world
    return json.loads(Path(words[3]).read_text())

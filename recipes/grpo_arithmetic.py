"""Reinforcement learning on sums, from nothing: a short supervised beginning, then answers and rewards.

hardware   2 CPU cores
command    python recipes/grpo_arithmetic.py
expect     NOT MEASURED
"""

from dataclasses import dataclass
from pathlib import Path

from dtgpt.cli import run_recipe
from dtgpt.config.grpo import GrpoConfig
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, DataConfig, LogConfig, OptimizerConfig
from dtgpt.models.llama import LlamaConfig
from dtgpt.ops.random.philox import fold_words
from dtgpt.util.storage import write_text

EXAMPLES = Path("runs", "sums.txt")  # of the supervised beginning


def numbers(index: int) -> tuple[int, int]:
    """Return the two numbers of a sum, 0 to 9, by its index."""
    a, b = fold_words(1, "sum", index)
    return a % 10, b % 10


@dataclass(frozen=True, kw_only=True)
class Sums(GrpoConfig):
    """A prompt is a sum; its reward is 1 where the answer is right."""

    def prompt(self, index: int) -> str:
        a, b = numbers(index)
        return f"\n{a}+{b}="

    def reward(self, index: int, answer: str) -> float:
        return float(answer == str(sum(numbers(index))))


def recipe() -> Recipe:
    EXAMPLES.parent.mkdir(exist_ok=True)
    lines = [f"{a}+{b}={a + b}" for a, b in map(numbers, range(1 << 20, (1 << 20) + 4000))]
    write_text(EXAMPLES, "\n".join(lines) + "\n")
    return Recipe(
        name="grpo_arithmetic",
        model=LlamaConfig(
            num_layers=2,
            hidden_size=64,
            num_heads=4,
            num_kv_heads=4,
            head_dim=16,
            ffn_hidden_size=192,
            seq_length=32,
            vocab_size=257,
        ),
        grpo=Sums(group=16, max_new_tokens=4, stop="\n", after=80),
        # min_lr is that of all steps with answers.
        optimizer=OptimizerConfig(lr=4e-3, min_lr=1e-3, warmup=20, decay_steps=80, weight_decay=0.0, clip=0.1),
        steps=400,
        seq_length=16,
        micro_batch_size=512,
        global_batch_size=512,
        data=DataConfig(path=str(EXAMPLES), tokenizer="bytes"),
        log=LogConfig(interval=25, eval_interval=0, sample_tokens=0),
        checkpoint=CheckpointConfig(interval=250),
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)

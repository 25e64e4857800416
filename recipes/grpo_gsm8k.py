"""GRPO on GSM8K: Llama 3.2 1B Instruct learns from whether the last number of its answer is right.

data       train.jsonl of github.com/openai/grade-school-math (grade_school_math/data)
hardware   one GPU of 80 GB
plan       dtgpt plan recipes/grpo_gsm8k.py --gpu H200
command    python recipes/grpo_gsm8k.py --init_from Llama-3.2-1B-Instruct --grpo.path train.jsonl
expect     64 questions of 8 answers in each step, three epochs of 7,473 questions; reward in metrics.jsonl, and the
           best and the worst answer of a step in answers/. The run was not tried.
then       dtgpt chat runs/grpo_gsm8k-001

docs/reinforcement.md has more. A model without a chat template: --grpo.chat off --grpo.stop $'\\n\\n'.
"""

from dataclasses import replace

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, LogConfig, OptimizerConfig
from dtgpt.models.llama import LLAMA32_1B
from dtgpt.posttrain.grpo.gsm8k import Gsm8k


def recipe() -> Recipe:
    return Recipe(
        name="grpo_gsm8k",
        model=replace(LLAMA32_1B, seq_length=512),
        grpo=Gsm8k(group=8, max_new_tokens=256),
        optimizer=OptimizerConfig(lr=1e-6, schedule="constant", warmup=10, weight_decay=0.0, beta2=0.999),
        steps=350,
        micro_batch_size=16,
        global_batch_size=512,
        log=LogConfig(interval=1, eval_interval=0, sample_tokens=0),
        checkpoint=CheckpointConfig(interval=50),
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)

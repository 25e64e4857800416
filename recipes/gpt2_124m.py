"""GPT-2 124M with the settings of llm.c's reproduction (scripts/run_gpt2_124M.sh): 10 B tokens, 0.5 M per step.

hardware   one GPU of 40 GB or more; on a smaller one, lower --micro_batch_size (the curve stays the same)
command    python recipes/gpt2_124m.py --data.path your.jsonl
short run  python recipes/gpt2_124m.py --steps 20 --optimizer.decay_steps 20 --optimizer.warmup 2 --log.interval 5
expect     22 GiB with --global_batch_size 64. Loss of the short run, measured with unfused operations: 10.9 -> 5.99.
           The full run was not repeated; llm.c's author reports about 3.28 on FineWeb.
measured   601,365 tokens/s on one H200 with --global_batch_size 64 (docs/benchmarks.md)
"""

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, LogConfig, OptimizerConfig
from dtgpt.models.gpt2 import GPT2_124M


def recipe() -> Recipe:
    return Recipe(
        name="gpt2_124m",
        model=GPT2_124M,
        optimizer=OptimizerConfig(lr=6e-4, min_lr=0.0, warmup=700, weight_decay=0.1, beta1=0.9, beta2=0.95),
        steps=18_865,
        micro_batch_size=64,
        global_batch_size=512,  # of 1024 tokens each: 524,288 tokens
        log=LogConfig(eval_interval=250, sample_interval=5000),
        checkpoint=CheckpointConfig(interval=1000),
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)

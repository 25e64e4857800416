"""GPT-3 175B with the settings of Megatron-LM's examples/gpt3/train_gpt3_175b_distributed.sh.

hardware   16 nodes of 8 GPUs of 80 GB with fast links within a node, or a multiple of that; see docs/cluster.md
plan       dtgpt plan recipes/gpt3_175b.py --world 128 --gpu 80
command    sbatch --nodes 16 recipes/slurm.sbatch recipes/gpt3_175b.py --data.path your.jsonl
expect     16 stages of 6 blocks and 43 GiB on each rank, as planned. Neither the full run nor a step of this
           size was tried.

Dropout is 0.1, Megatron-LM's default. The batch grows from 16 to 1536 samples over the first 5,859,375, as in versions
of the script with --rampup-batch-size; newer ones have a schedule of steps instead. With more than one replica, the
pipeline needs 16 samples per replica at the start: on 32 nodes use --rampup_batch_size '32 16 5859375'. Also other than
in the script: bf16 with fp32 master weights, not fp16 (--precision fp16), and sequence parallelism (the same results).
"""

from dataclasses import replace

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, LogConfig, OptimizerConfig
from dtgpt.models.gpt2 import GPT3_175B


def recipe() -> Recipe:
    return Recipe(
        name="gpt3_175b",
        model=replace(GPT3_175B, dropout=0.1, init_std=0.006),
        plan="tp8_sp_pp16",
        optimizer=OptimizerConfig(
            lr=6e-5,
            min_lr=6e-6,
            schedule="cosine",
            warmup=0.001,
            decay_steps=430_000,
            weight_decay=0.1,
            beta1=0.9,
            beta2=0.95,
            clip=1.0,
        ),
        steps=500_000,
        micro_batch_size=1,
        global_batch_size=1536,  # of 2048 tokens each: 3,145,728 tokens
        rampup_batch_size="16 16 5859375",
        log=LogConfig(interval=100, eval_interval=1000, eval_samples=10 * 1536),
        checkpoint=CheckpointConfig(interval=10_000),
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)

"""GPT-3 175B with the settings of Megatron-LM's examples/gpt3/train_gpt3_175b_distributed.sh.

hardware   16 nodes of 8 GPUs of 80 GB with fast links inside a node, or a multiple of that; see docs/cluster.md
look first dtgpt plan recipes/gpt3_175b.py --world 128
command    sbatch --nodes 16 recipes/slurm.sbatch recipes/gpt3_175b.py --data.path your.jsonl
expect     of the look: 16 stages of 6 blocks, under 80 GB on each rank. Neither the full run nor one step of this
           size was done here. Each rank writes its own part of a checkpoint, from a copy in main memory.

The script leaves dropout at Megatron-LM's defaults, 0.1 for hidden states and attention, and so does this recipe. The
batch grows as in the script, from 16 samples to 1536 over the first 5,859,375; with more than one replica the pipeline
needs 16 for each at first, as in --rampup_batch_size '32 16 5859375' on 32 nodes. The recipe differs in bf16 with fp32
master weights (there: fp16 with loss scaling, --precision fp16 here) and in sequence parallelism, with equal results.
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

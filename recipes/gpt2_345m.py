"""GPT-2 345M with the settings of Megatron-LM's examples/pretrain_gpt.sh.

hardware   one GPU of 16 GB or more
command    python recipes/gpt2_345m.py --data.path your.jsonl
short run  python recipes/gpt2_345m.py --steps 50 --optimizer.decay_steps 50 --log.interval 5
expect     19 GiB with --micro_batch_size 16. Loss of the short run, measured with unfused operations: 11.0 -> 6.05.
           The full run was not repeated.
measured   209,813 tokens/s on one H200 with --micro_batch_size 16 --global_batch_size 16; 217,704 with --model.dropout
           0 as well (docs/benchmarks.md)
"""

from dataclasses import replace

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, LogConfig, OptimizerConfig
from dtgpt.models.gpt2 import GPT2_345M


def recipe() -> Recipe:
    return Recipe(
        name="gpt2_345m",
        model=replace(GPT2_345M, dropout=0.1),
        optimizer=OptimizerConfig(
            lr=1.5e-4,
            min_lr=1e-5,
            schedule="cosine",
            warmup=0.01,
            decay_steps=320_000,
            weight_decay=0.01,
            beta1=0.9,
            beta2=0.999,
            clip=1.0,
        ),
        plan="dp",  # or tp2_sp, zero3, tp2_pp2, ...: the curve stays the same
        # plans={"mine": Plan(dp=2, tp=2, pp=2, blocks_per_stage=(13, 11))},  # with dtgpt.config.plan.Plan
        attention="auto",  # fused_softmax: scale, mask and softmax in one CUDA kernel, as in Megatron-LM
        steps=500_000,
        micro_batch_size=4,
        global_batch_size=8,
        log=LogConfig(interval=100, eval_interval=1000, eval_samples=80, sample_interval=10_000),
        checkpoint=CheckpointConfig(interval=10_000),
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)

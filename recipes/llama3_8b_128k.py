"""Llama 3 8B continued at samples of 131,072 tokens, with Llama 3.1's scaling of rotary positions (Dubey et al. 2024,
section 3.4.2), from the weights of a model that was trained on 8192.

hardware   8 GPUs of 141 GB
plan       dtgpt plan recipes/llama3_8b_128k.py --world 8 --gpu H200
command    torchrun --nproc-per-node 8 recipes/llama3_8b_128k.py --init_from Meta-Llama-3-8B \\
           --data.path tokens_text_document
shorter    the same with --seq_length 32768 --plan cp2_zero3 and a --global_batch_size of 128
expect     98 GiB on each GPU, as planned; the run was not tried on GPUs

Tokens attend to their own document alone. A batch has 4 million tokens. The paper raises the length in six stages, each
until short texts are predicted as well as before; this recipe is one stage: begin the next from its run folder.
"""

from dataclasses import replace

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, DataConfig, LogConfig, OptimizerConfig
from dtgpt.models.llama import LLAMA3_8B


def recipe() -> Recipe:
    return Recipe(
        name="llama3_8b_128k",
        model=replace(LLAMA3_8B, seq_length=131_072, rope_factor=8.0),
        plan="cp8_zero3",
        optimizer=OptimizerConfig(lr=1e-5, min_lr=1e-6, schedule="cosine", warmup=100, weight_decay=0.1, beta2=0.95),
        steps=2000,
        micro_batch_size=1,
        global_batch_size=32,  # of 131,072 tokens each: 4,194,304 tokens
        data=DataConfig(reset_attention_mask=True),
        log=LogConfig(interval=10, eval_interval=200, eval_samples=32, sample_interval=0),
        checkpoint=CheckpointConfig(interval=200),
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)

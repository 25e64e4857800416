"""Llama 3.2 1B on chats: all weights, or adapters with --lora.rank 16 --optimizer.lr 2e-4.

prepare    dtgpt prepare chats.jsonl --chat --tokenizer Llama-3.2-1B-Instruct --output-prefix mine
hardware   one GPU of 40 GB or more; adapters: of 12 GB
plan       dtgpt plan recipes/sft_llama32_1b.py --gpu H100
command    python recipes/sft_llama32_1b.py --init_from Llama-3.2-1B-Instruct --data.path mine_chat_document
expect     chats packed into samples of 4096 tokens, the loss on answers alone, and at every evaluation three held-out
           chats with the model's answers in samples/. The full run was not tried.
measured   69,111 tokens/s and 42.94 GiB on one H200 for the same step with 4 samples a pass (docs/benchmarks.md)
then       dtgpt chat runs/sft_llama32_1b-001

The number of steps is for some 50,000 chats: two to three epochs. Schedule and warmup are those of Tulu 3 (Lambert et
al. 2024). docs/finetuning.md has more.
"""

from dataclasses import replace

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, LogConfig, OptimizerConfig
from dtgpt.models.llama import LLAMA32_1B


def recipe() -> Recipe:
    return Recipe(
        name="sft_llama32_1b",
        model=replace(LLAMA32_1B, seq_length=4096),
        optimizer=OptimizerConfig(
            lr=1e-5, min_lr=0.0, schedule="linear", warmup=0.03, weight_decay=0.0, beta1=0.9, beta2=0.999, clip=1.0
        ),
        steps=600,
        micro_batch_size=1,
        global_batch_size=16,  # of 4096 tokens, about 200 chats
        log=LogConfig(interval=10, eval_interval=100, eval_samples=64, sample_interval=100, sample_tokens=200),
        checkpoint=CheckpointConfig(interval=200),
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)

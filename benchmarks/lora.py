"""Speed and memory of fine-tuning: LoRA of the 8B, and the full training of the 1B on documents with weighted tokens.

    python benchmarks/lora.py                  # one H200: about 4 minutes
    python benchmarks/lora.py --tiny           # on a CPU, to see that it runs

Weights are random, which changes no time; tokens are those of a text included in Python. LoRA: LLAMA3_8B in bf16,
samples of 4096 tokens, rank 16 on all matrices. Full: LLAMA32_1B, samples of 4096 tokens with documents kept apart and
without the loss of the token after each, and the same as in pretraining, without either. Each line: tokens/s over the
last steps, peak memory, that of `dtgpt plan`, and the loss.
"""

import argparse
import json
import time
from dataclasses import replace

import torch
from figures import note

from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import DataConfig, OptimizerConfig
from dtgpt.models.llama import LLAMA3_8B, LLAMA32_1B, LlamaConfig
from dtgpt.parallel.mesh import Mesh
from dtgpt.planning.memory import memory_of
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.train.objective import objective_of
from dtgpt.train.setup import read_dataset
from dtgpt.train.trainer import Trainer

TINY = LlamaConfig(
    num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_hidden_size=96, seq_length=64,
    vocab_size=1024,
)  # fmt: skip
TEXT = DataConfig(tokenizer="bytes")
PACKED = replace(TEXT, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)


def measure(recipe: Recipe, steps: int, warm_up: int) -> dict[str, float]:
    """Return the speed and the memory of a run of one process, whose weights are random."""
    recipe.validate()
    device, plan = torch.device("cuda" if recipe.device == "cuda" else "cpu"), ResolvedPlan(dp=1)
    settings = recipe.settings(plan, device)
    planned = memory_of(settings, 0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    kind, given = objective_of(recipe)
    trainer = Trainer(recipe, settings, Mesh(plan, device), kind(given, read_dataset(recipe)))
    for step in range(warm_up + steps):
        if step == warm_up:
            loss, begin = trainer.mean_loss(result), time.perf_counter()  # noqa: F821 - waits for the device
        result = trainer.train_step()
    loss = trainer.mean_loss(result)
    seconds = time.perf_counter() - begin
    found = {"tokens/s": steps * recipe.global_batch_size * recipe.sample_length / seconds, "loss": loss}
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        found |= {"peak GiB": peak / 2**30, "planned / peak": planned.total / peak}
        trainer.graphs.release()
    return found | {"planned GiB": planned.total / 2**30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--only", choices=["lora", "pretraining", "packed"], help="one of the three")
    parser.add_argument("--micro-batch-size", type=int, default=None, help="samples of a pass")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=8)
    options = parser.parse_args()
    large, small = (TINY, TINY) if options.tiny else (LLAMA3_8B, LLAMA32_1B)
    length = 64 if options.tiny else 4096
    sizes = {"lora": options.micro_batch_size or 1, "full": options.micro_batch_size or 2}
    base = Recipe(
        name="lora",
        model=replace(small, seq_length=length),
        data=TEXT,
        optimizer=OptimizerConfig(lr=1e-5),
        micro_batch_size=sizes["full"],
        global_batch_size=4 * sizes["full"],
        steps=1000,
        device="cpu" if options.tiny else "cuda",
    )
    lora = replace(
        base,
        model=replace(large, seq_length=length),
        lora=LoraConfig(rank=16, alpha=32.0),
        micro_batch_size=sizes["lora"],
        global_batch_size=4 * sizes["lora"],
    )
    runs = {"lora": lora, "pretraining": base, "packed": replace(base, data=PACKED)}
    for name, recipe in runs.items():
        if options.only in (None, name):
            found = measure(recipe, options.steps, options.warm_up)
            print(json.dumps({"run": name} | found), flush=True)
            units = {"tokens/s": "tokens/s", "peak GiB": "GiB", "planned GiB": "planned GiB", "loss": "loss"}
            note(name, {unit: found.get(key) for key, unit in units.items()})


if __name__ == "__main__":
    main()

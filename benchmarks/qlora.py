"""Speed and memory of LoRA beside a base in 4 bits (QLoRA) and beside one in 16 bits, step by step in turns.

    python benchmarks/qlora.py                 # one H200: about 3 minutes
    python benchmarks/qlora.py --tiny          # on a CPU, to see that it runs

LLAMA3_8B in bf16, samples of 4096 tokens, rank 16 on all matrices, one sample a micro-batch, four a step. Weights are
random, which changes no time. QLoRA computes all but attention again in backward, so that it fits into 12 GiB; LoRA
does so only where it is told to. Each line: tokens/s in the median of rounds, peak memory of the steps and of the
arrival of weights before them, that of `dtgpt plan`, and the loss. Each peak is that of one run: the base in 4 bits
comes first.
"""

import argparse
import json
import statistics
from dataclasses import replace

import torch
from figures import note, ratios
from lora import TEXT, TINY
from train_step import alternating, ratio

from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.llama import LLAMA3_8B
from dtgpt.parallel.mesh import Mesh
from dtgpt.planning.memory import memory_of
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.train.objective import objective_of
from dtgpt.train.setup import read_dataset
from dtgpt.train.trainer import Trainer

GIB = 2**30


def peak_of(device: torch.device) -> float:
    """Return the GiB that were in use at most since the last call, and begin anew."""
    if device.type == "cpu":
        return 0.0
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() / GIB
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return found


def opened(recipe: Recipe, device: torch.device, warm_up: int) -> tuple[Trainer, dict[str, float]]:
    """Return the trainer of a run of one process, after its first steps, and the GiB that these took."""
    recipe.validate()
    plan = ResolvedPlan(dp=1)
    settings = recipe.settings(plan, device)
    planned = memory_of(settings, 0).total / GIB
    peak_of(device)
    before = torch.cuda.memory_allocated() / GIB if device.type == "cuda" else 0.0
    kind, given = objective_of(recipe)
    trainer = Trainer(recipe, settings, Mesh(plan, device), kind(given, read_dataset(recipe)))
    arrival = peak_of(device) - before
    for _ in range(warm_up):
        trainer.train_step()
    found = {"planned GiB": planned}
    if device.type == "cuda":
        peak = peak_of(device) - before
        found |= {"peak GiB": peak, "planned / peak": planned / peak, "arrival GiB": arrival}
    return trainer, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--recompute", default="around_attention", help="of QLoRA, as a recipe has it")
    parser.add_argument("--lora-recompute", default="none", help="of LoRA in 16 bits")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each")
    parser.add_argument("--warm-up", type=int, default=6)
    options = parser.parse_args()
    device, length = torch.device("cpu" if options.tiny else "cuda"), 64 if options.tiny else 4096
    base = Recipe(
        name="qlora",
        model=replace(TINY if options.tiny else LLAMA3_8B, seq_length=length),
        data=TEXT,
        optimizer=OptimizerConfig(lr=1e-5),
        micro_batch_size=1,
        global_batch_size=4,
        steps=1000,
        device=device.type,
    )
    if options.tiny:
        base = replace(base, model=replace(base.model, ffn_hidden_size=128))
    runs = {
        "qlora": replace(base, lora=LoraConfig(rank=16, bits=4), recompute=options.recompute),
        "lora": replace(base, lora=LoraConfig(rank=16), recompute=options.lora_recompute),
    }
    made = {name: opened(recipe, device, options.warm_up) for name, recipe in runs.items()}
    trainers = {name: trainer for name, (trainer, _) in made.items()}
    rounds = alternating([trainer.train_step for trainer in trainers.values()], options.steps, device)
    medians = {name: [statistics.median(each) for each in own] for name, own in zip(made, rounds, strict=True)}
    for name, (trainer, found) in made.items():
        tokens = base.global_batch_size * base.sample_length
        found |= {"tokens/s": tokens / statistics.median(medians[name])}
        found |= {"loss": trainer.mean_loss(trainer.train_step())}
        print(json.dumps({"run": name} | found), flush=True)
        units = {"tokens/s": "tokens/s", "peak GiB": "GiB", "planned GiB": "planned GiB", "loss": "loss"}
        note(name, {unit: found.get(key) for key, unit in units.items()}, [1e3 * each for each in medians[name]])
        trainer.graphs.release()
    print(f"QLoRA is {ratio(medians['qlora'], medians['lora'])} x as fast as LoRA in 16 bits")
    note("qlora / lora", ratios(medians["qlora"], medians["lora"]))


if __name__ == "__main__":
    main()

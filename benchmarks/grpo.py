"""Times of a step of GRPO by part: answers drawn by the engine, rewards, the training step.

    python benchmarks/grpo.py --model llama32_1b                    # 64 prompts x 8 answers of 256 tokens
    python benchmarks/grpo.py --model tiny_llama --prompts 4 --group 4 --new 16 --device cpu
    python benchmarks/grpo.py --recipe recipes/grpo_gsm8k.py --init_from MODEL --grpo.path train.jsonl --steps 8

Options unknown to the script are options of the recipe. Without --recipe weights are random, and tokens are
characters, so that no answer ends early. Each line is a step; the last one has medians without the first steps, in
which kernels are compiled and graphs captured. Training rates count the tokens of prompts and answers, without what
fills samples.
--bits: how many log-probabilities of answers differ from those of training's forward pass (plans without pp and ZeRO).
"""

import argparse
import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from decode_models import MODELS
from exact import trained
from figures import note

from dtgpt.config.overrides import apply_overrides
from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import call_recipe, load_module
from dtgpt.config.sections import DataConfig, OptimizerConfig
from dtgpt.models.batch import Batch
from dtgpt.parallel.context_parallel.batches import slice_of
from dtgpt.posttrain.grpo.config import GrpoConfig
from dtgpt.train.setup import open_trainer
from dtgpt.train.trainer import Trainer
from dtgpt.util.shared.device_words import device_name

PARTS = ("rollout_seconds", "scoring_seconds", "training_seconds")
RATES = ("rollout_tokens_per_second", "training_tokens_per_second")


@dataclass(frozen=True, kw_only=True)
class Characters(GrpoConfig):
    """Texts of a length, and a reward that differs from answer to answer."""

    length: int = 64

    def prompt(self, index: int) -> str:
        return f"{index} {'and so on ' * self.length}"[: self.length]

    def reward(self, index: int, answer: str) -> float:
        return sum(map(ord, answer)) % 101 / 100


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the recipe that is measured, without the options of the command line."""
    if args.recipe:
        return call_recipe(load_module(Path(args.recipe)).recipe)
    length, batch = args.prompt + args.new, args.prompts * args.group
    return Recipe(
        name="grpo",
        model=replace(MODELS[args.model], seq_length=length),
        grpo=Characters(group=args.group, max_new_tokens=args.new, length=args.prompt),
        optimizer=OptimizerConfig(lr=1e-6, schedule="constant"),
        data=DataConfig(tokenizer="char"),
        micro_batch_size=min(batch, 16),
        global_batch_size=batch,
        steps=10**6,
    )


def differing(trainer: Trainer) -> tuple[int, int]:
    """Return (tokens of the next step's answers, those whose log-probability is not that of training, to the bit)."""
    answers, length = trainer.objective.rollouts.draw(trainer.step), trainer.settings.seq_length
    tokens = torch.zeros(len(answers), length + 1, dtype=torch.int64)
    drawn = torch.full((len(answers), length), math.nan)
    for row, answer in enumerate(answers):
        ids, first = answer.prompt_ids + answer.ids, len(answer.prompt_ids) - 1
        tokens[row, : len(ids)] = torch.tensor(ids)
        drawn[row, first : first + len(answer.ids)] = torch.tensor(answer.logprobs)
    wrong, mesh = 0, trainer.mesh
    for piece, expected in zip(*(x.split(trainer.settings.micro_batch_size) for x in (tokens, drawn)), strict=True):
        given = piece.to(mesh.device)
        whole = Batch(given[:, :-1].contiguous(), targets=given[:, 1:].contiguous())
        batch = slice_of(whole, mesh.place.cp, mesh.plan.cp)
        own = expected.chunk(mesh.plan.cp, dim=1)[mesh.place.cp]
        wrong += int(((trained(trainer.stages[0], batch).cpu() != own) & ~own.isnan()).sum())
    return sum(len(answer.ids) for answer in answers), round(mesh.sum(wrong).item() * mesh.plan.cp / mesh.world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="llama32_1b")
    parser.add_argument("--recipe", help="recipe with a task, in place of the model's")
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="answers to each")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=4, help="steps that medians leave out")
    parser.add_argument("--bits", action="store_true", help="compare log-probabilities in each step")
    args, options = parser.parse_known_args()
    recipe = apply_overrides(recipe_of(args), options)
    records, tokens, wrong = [], 0, 0
    with open_trainer(recipe) as trainer:
        exact, name = trainer.objective.rollouts.exact, device_name(trainer.mesh.device)
        print(f"{recipe.name}, {trainer.mesh.plan.name} on {name}, exact {exact}", flush=True)
        for _ in range(args.steps):
            if args.bits:
                drawn, differ = differing(trainer)
                tokens, wrong = tokens + drawn, wrong + differ
            trainer.mean_loss(trainer.train_step())  # waits for the device
            records.append(trainer.objective.rollouts.figures())
            print(json.dumps({key: round(value, 4) for key, value in records[-1].items()}), flush=True)
        memory = torch.cuda.max_memory_allocated() / 2**30 if trainer.mesh.device.type == "cuda" else None
    kept = records[args.warm_up :] or records
    found = {key: round(statistics.median(record[key] for record in kept), 4) for key in (*PARTS, *RATES)}
    whole = statistics.median(sum(record[part] for part in PARTS) for record in kept)
    print(json.dumps({"step_seconds": round(whole, 4), **found} | ({"peak GiB": memory} if memory else {})))
    rounds = [sum(record[part] for part in PARTS) for record in kept]
    steps = {"s": whole, "drawn s": found["rollout_seconds"], "rewards s": found["scoring_seconds"]}
    steps |= {"trained s": found["training_seconds"], "drawn tokens/s": found["rollout_tokens_per_second"]}
    note("step", {**steps, "trained tokens/s": found["training_tokens_per_second"], "GiB": memory}, rounds)
    if args.bits:
        note("bits", {"differ": wrong, "log-probabilities": tokens})
        print(f"{wrong} of {tokens:,} log-probabilities differ in their bits")


if __name__ == "__main__":
    main()

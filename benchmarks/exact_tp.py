"""Bits and time of `--reduce exact_tp`: one process beside plans with tensor parallelism.

    python benchmarks/exact_tp.py                          # two GPUs: GPT-2 345M, and a LLaMA of 0.4 B, 30 steps each
    python benchmarks/exact_tp.py --plans tp4_sp tp2_pp2 dp2_tp2_zero3 --steps 100       # four GPUs
    python benchmarks/exact_tp.py --model olmoe --plans tp2 tp2_sp dp2_ep2               # two blocks of OLMoE
    python benchmarks/exact_tp.py --model tiny --device cpu --precision fp32 --steps 3   # a CPU

In each model and plan: how many losses and norms of steps, and elements of the last gradient and of the new weights,
have other bits than on one process, and the time of a step in which nothing is measured. Then the same of plain sums,
whose bits differ: their time is what the ratio of speeds is to. Batches, dropout and initial weights are those of a
training run. With --choices, of a model with experts: how many tokens chose others in a layer than on one process, in
all steps, which are then not captured. The last line says whether all bits are equal; the exit code, too.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from figures import note
from torch import Tensor

from dtgpt.compare.choices import Choices
from dtgpt.compare.fuzz.pool import Pool, PoolJob
from dtgpt.compare.whole_tensors import gather_whole
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import LogConfig, OptimizerConfig
from dtgpt.models.families.olmoe import OLMOE_1B_7B, OlmoeConfig
from dtgpt.models.gpt2 import GPT2_345M, GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.parallel.exact_tp.config import PiecesConfig
from dtgpt.train.setup import open_trainer
from dtgpt.train.trainer import Trainer

LLAMA = LlamaConfig(
    num_layers=24,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    ffn_hidden_size=4096,
    seq_length=1024,
    vocab_size=32000,
    dropout=0.1,
)
TINY = GPT2Config(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=1100, dropout=0.1)
TINY_LLAMA = replace(
    LLAMA, num_layers=2, hidden_size=32, num_heads=8, num_kv_heads=4, head_dim=8, ffn_hidden_size=48, seq_length=16,
    vocab_size=1100,
)  # fmt: skip
TINY_OLMOE = OlmoeConfig(
    num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_hidden_size=24, num_experts=8,
    experts_per_token=2, seq_length=16, vocab_size=1100,
)  # fmt: skip
MODELS: dict[str, tuple[Any, int, int]] = {  # with samples of a micro-batch, and of a step
    "olmoe": (replace(OLMOE_1B_7B, num_layers=2, seq_length=2048), 8, 16),
    "tiny_olmoe": (TINY_OLMOE, 2, 4),
    "345m": (replace(GPT2_345M, dropout=0.1), 16, 32),
    "llama": (LLAMA, 16, 32),
    "tiny": (TINY, 2, 4),
    "tiny_llama": (TINY_LLAMA, 2, 4),
}
PLANS = ("tp2", "tp2_sp", "dp2")
WARMUP = 5  # steps, which capture graphs, before the time is taken


class Run(NamedTuple):
    """What a run has shown."""

    losses: list[float]
    norms: list[float]
    seconds: float  # of a step
    memory: float  # GiB of the fullest rank
    different: dict[str, int]  # elements of each tensor that differ from the reference, where there are some
    elements: int
    choices: dict[str, Tensor]  # of each step and block, int32 `[samples, T, k]`


def take_steps(recipe: Recipe, steps: int, file: str, compares: bool, sees_choices: bool) -> Run:
    """Train in each process of a plan. The whole gradient of the last step and the weights after it are written to a
    file, or compared with it."""
    with open_trainer(recipe) as trainer:
        choices = Choices(trainer.mesh.rank, recipe.micro_batch_size, None)
        if sees_choices:
            choices.attach(trainer.stages)
        results, begin, first = [], time.perf_counter(), min(WARMUP, steps - 2)
        if recipe.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for step in range(steps - 1):
            if step == first:
                settle(trainer)
                begin = time.perf_counter()
            with choices.of_step(step):
                results.append(trainer.train_step())
        settle(trainer)
        seconds = (time.perf_counter() - begin) / (steps - 1 - first)
        loss = trainer.gradients()
        found = {f"gradient of {name}": whole for name, whole in gather_whole(trainer.shards, trainer.gradient)}
        results.append(trainer.update(loss))
        found |= {f"weight {name}": whole for name, whole in gather_whole(trainer.shards, lambda shard: shard.local)}
        losses, norms = [trainer.mean_loss(r) for r in results], [r.norm.item() for r in results]
        peak = torch.cuda.max_memory_allocated() / 2**30 if recipe.device == "cuda" else 0.0
        memory = max(trainer.mesh.gather(peak))
        different: dict[str, int] = {}
        if file and trainer.mesh.rank == 0:
            if compares:
                different = differences(found, torch.load(file, mmap=True))
            else:
                torch.save(found, file)
        elements = sum(0 if x is None else x.numel() for x in found.values())
        return Run(losses, norms, seconds, memory, different, elements, whole_choices(trainer, choices))


def whole_choices(trainer: Trainer, choices: Choices) -> dict[str, Tensor]:
    """Return the choices of the samples of all ranks, sorted in a token, on rank 0."""
    place = trainer.mesh.place
    own = {key: torch.cat(parts).sort(-1).values for key, parts in choices.kept.items()} if place.tp == 0 else {}
    ranks = [made for _, made in sorted(trainer.mesh.gather((place.dp, own)), key=lambda each: each[0]) if made]
    return {key: torch.cat([made[key] for made in ranks]) for key in ranks[0]} if ranks else {}


def settle(trainer: Trainer) -> None:
    """Wait until all ranks have done what was asked of them."""
    if trainer.settings.device.type == "cuda":
        torch.cuda.synchronize()
    trainer.mesh.gather(None)


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, int]:
    """Return how many elements of each fp32 tensor have other bits; those of which none has are left out."""
    counts = {
        name: int((whole.view(torch.int32) != expected[name].view(torch.int32)).sum()) for name, whole in found.items()
    }
    return {name: count for name, count in counts.items() if count}


def recipe_of(args: argparse.Namespace, model: str, plan: str, reduce: str) -> Recipe:
    """Return the recipe of a run."""
    config, micro, whole = MODELS[model]
    given = {"exact_tp": PiecesConfig(pieces=args.pieces)} if reduce == "exact_tp" else {}
    return Recipe(
        name="exact_tp",
        model=config,
        optimizer=OptimizerConfig(lr=1e-3, warmup=2),
        plan=plan,
        steps=args.steps,
        micro_batch_size=args.micro_batch_size or micro,
        global_batch_size=args.global_batch_size or whole,
        precision=args.precision,
        device=args.device,
        reduce=reduce,
        graph="off" if args.choices else "auto",
        compile="off",
        log=LogConfig(eval_interval=0, sample_interval=0),
        **given,
    )


def run(pool: Pool, args: argparse.Namespace, recipe: Recipe, file: str = "", compares: bool = False) -> Run:
    """Train under a plan, and return what rank 0 saw. Raises RuntimeError where a rank failed."""
    given = recipe, args.steps, file, compares, args.choices
    (results,) = pool.run([PoolJob(parse_plan(str(recipe.plan), {}).world, take_steps, given)], args.timeout)
    for result in results:
        if result.failure or result.refusal:
            raise RuntimeError(f"{recipe.plan}: {result.refusal or result.failure}\n{result.output}")
    return results[0].value


def tell(model: str, plan: str, made: Run, reference: Run) -> bool:
    """Print how far a run is from the reference, and return whether its bits are the same."""
    pairs = [("losses", made.losses, reference.losses), ("norms", made.norms, reference.norms)]
    counts = {name: sum(a != b for a, b in zip(ours, theirs, strict=True)) for name, ours, theirs in pairs}
    counts["elements"] = sum(made.different.values())
    print(
        f"{model} {plan}: of {len(made.losses)} steps {counts['losses']} losses and {counts['norms']} norms, and "
        f"{counts['elements']:,} of {made.elements:,} elements of gradient and weights have other bits; "
        f"{1e3 * made.seconds:.1f} ms a step, {made.memory:.1f} GiB; last loss {made.losses[-1]:.6f}",
        flush=True,
    )
    if made.choices:
        pairs = [(each, reference.choices[key]) for key, each in made.choices.items()]
        counts["choices"] = sum(int((own != other).any(-1).sum()) for own, other in pairs)
        seen = sum(own[..., 0].numel() for own, _ in pairs)
        print(f"    of {seen:,} tokens in a layer {counts['choices']:,} have other experts", flush=True)
    for name, count in list(made.different.items())[:8]:
        print(f"    {count:,} of {name}", flush=True)
    note(f"exact_tp {model} {plan}", {"other bits": sum(counts.values()), "ms": 1e3 * made.seconds})
    return not any(counts.values())


def compare(pool: Pool, args: argparse.Namespace, model: str) -> bool:
    """Compare the plans of a model with one process. Return whether all bits are the same."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        file, same = str(Path(folder) / "reference"), True
        exact = {"single": run(pool, args, recipe_of(args, model, "single", "exact_tp"), file)}
        tell(model, "single", exact["single"], exact["single"])
        for plan in args.plans:
            exact[plan] = run(pool, args, recipe_of(args, model, plan, "exact_tp"), file, True)
            same = tell(model, plan, exact[plan], exact["single"]) and same
    for plan in ("single", *args.timed):
        plain = run(pool, args, recipe_of(args, model, plan, "fast"))
        ratio = plain.seconds / exact[plan].seconds if plan in exact else float("nan")
        print(
            f"{model} {plan} --reduce fast: {1e3 * plain.seconds:.1f} ms a step, {plain.memory:.1f} GiB; exact_tp has "
            f"{ratio:.3f} of its speed; last loss {plain.losses[-1]:.6f}",
            flush=True,
        )
        note(f"exact_tp {model} {plan} beside fast", {"ms": 1e3 * plain.seconds, "ratio": ratio})
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["345m", "llama"])
    parser.add_argument("--plans", nargs="*", default=list(PLANS), help="compared with one process")
    parser.add_argument("--timed", nargs="*", default=["tp2_sp"], help="also with --reduce fast, beside one process")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--choices", action="store_true", help="compare the experts of each token")
    parser.add_argument("--pieces", type=int, default=8)
    parser.add_argument("--micro_batch_size", type=int)
    parser.add_argument("--global_batch_size", type=int)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--folder", help="for the tensors of the reference; none: a temporary one")
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds of a run")
    args = parser.parse_args()
    with Pool(args.device) as pool:
        same = min([compare(pool, args, model) for model in args.model])  # all of them, also after one that differs
    print("all bits are equal" if same else "bits differ", flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

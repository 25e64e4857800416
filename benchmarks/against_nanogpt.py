"""Our training step beside nanoGPT's on one device, in turns: tokens/s of both and the ratio.

    python benchmarks/against_nanogpt.py --nanogpt PATH --model 345m --micro_batch_size 16 --dropout 0.1

PATH is a checkout of https://github.com/karpathy/nanoGPT, whose `model.py` is imported as it is. Its step is written
here after its `train.py`: autocast to bf16, torch.compile, TF32 where fp32 is left, fused AdamW, clipping at 1. Both
see the same tokens and have biases and 50304 rows in the table; nanoGPT's GELU is the exact one.
"""

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from train_step import alternating, make_recipe, ratio

from dtgpt.config.recipe import Recipe
from dtgpt.train.startup import open_trainer
from dtgpt.train.trainer import Trainer
from dtgpt.util.errors import UserError
from dtgpt.util.hardware import peak_flops


def import_model(folder: Path) -> ModuleType:
    file = folder / "model.py"
    if not file.is_file():
        raise UserError(f"{folder} has no model.py; give --nanogpt a checkout of nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and the compiler look it up
    spec.loader.exec_module(module)
    return module


class NanoGPT:
    """nanoGPT's training step with the sizes, the tokens and the optimizer's settings of ours."""

    def __init__(self, folder: Path, recipe: Recipe, ours: Trainer):
        config = recipe.model
        self.device, self.tokens, self.length = ours.mesh.device, ours.dataset.train, config.seq_length
        self.batch, self.micro_batches = recipe.micro_batch_size, ours.settings.micro_batches
        self.rate, cuda = recipe.optimizer.lr, self.device.type == "cuda"
        torch.manual_seed(recipe.seed)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        module = import_model(folder)
        sizes = {"n_layer": config.num_layers, "n_head": config.num_heads, "n_embd": config.hidden_size}
        sizes |= {"block_size": self.length, "vocab_size": config.padded_vocab_size, "dropout": config.dropout}
        plain = module.GPT(module.GPTConfig(**sizes, bias=True)).to(self.device)
        settings = recipe.optimizer
        betas = (settings.beta1, settings.beta2)
        self.optimizer = plain.configure_optimizers(settings.weight_decay, self.rate, betas, self.device.type)
        self.model: nn.Module = torch.compile(plain) if cuda else plain
        self.autocast = torch.amp.autocast("cuda", torch.bfloat16) if cuda else nullcontext()
        self.next = self.draw()

    def draw(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.tokens) - self.length, (self.batch,))
        windows = [torch.from_numpy(self.tokens[i : i + self.length + 1].astype("int64")) for i in starts.tolist()]
        inputs, targets = (torch.stack([w[first : first + self.length] for w in windows]) for first in (0, 1))
        if self.device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def step(self) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        for _ in range(self.micro_batches):
            with self.autocast:
                _, loss = self.model(*self.next)
                loss = loss / self.micro_batches
            self.next = self.draw()  # while the device works
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach() * self.micro_batches


def measure(args: argparse.Namespace, overrides: list[str]) -> dict[str, dict[str, float]]:
    """By name: seconds of a step, tokens/s, MFU, loss after the last step, and the seconds of each round."""
    recipe = make_recipe(args, overrides, "single")[0]
    with open_trainer(recipe) as ours:
        theirs, device = NanoGPT(args.nanogpt, recipe, ours), ours.mesh.device
        steps: dict[str, Callable[[], object]] = {"dtgpt": ours.train_step, "nanoGPT": theirs.step}
        for step in steps.values():
            for _ in range(args.warmup):
                step()
        times = alternating(list(steps.values()), args.steps, device)
        losses = [ours.mean_loss(steps["dtgpt"]()), theirs.step().item()]
        tokens, peak = recipe.global_batch_size * recipe.model.seq_length, peak_flops(device, torch.bfloat16)
        found = {}
        for name, rounds, loss in zip(steps, times, losses, strict=True):
            seconds = statistics.median(t for times in rounds for t in times)
            mfu = recipe.model.flops_per_token * tokens / seconds / peak if peak else None
            found[name] = {"seconds": seconds, "tokens_per_second": tokens / seconds, "mfu": mfu, "loss": loss}
            found[name]["rounds"] = [statistics.median(times) for times in rounds]
        return found


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.allow_abbrev = False
    parser.add_argument("--nanogpt", type=Path, required=True, help="checkout of nanoGPT")
    parser.add_argument("--model", default="345m", help="as train_step.py takes it")
    parser.add_argument("--micro_batch_size", type=int, default=16)
    parser.add_argument("--micro_batches", type=int, default=1)
    parser.add_argument("--dropout", type=float, help="default: the recipe's")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each")
    parser.add_argument("--warmup", type=int, default=6)
    parser.set_defaults(plans=["single"])
    return parser.parse_known_args()


def main() -> int:
    args, overrides = parse()
    try:
        found = measure(args, overrides)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{args.model}, {args.micro_batches} x {args.micro_batch_size} samples a step")
    for name, r in found.items():
        rate = f"{r['tokens_per_second']:,.0f} tokens/s" + (f", {r['mfu']:.1%} MFU" if r["mfu"] else "")
        print(f"{name:<10}{rate:<32}{r['seconds'] * 1e3:.2f} ms a step, loss {r['loss']:.3f}")
    print(f"dtgpt is {ratio(found['dtgpt']['rounds'], found['nanoGPT']['rounds'])} x as fast")
    return 0


if __name__ == "__main__":
    sys.exit(main())

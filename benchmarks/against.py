"""What the scripts that measure a training step of dtgpt beside another library's have in common."""

import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext

import torch
from energy import joules_of_steps
from figures import note, ratios
from torch import Tensor, nn
from train_step import alternating, make_recipe, ratio

from dtgpt.config.recipe import Recipe
from dtgpt.models.shared.flops import flops_per_token
from dtgpt.train.setup import open_trainer
from dtgpt.train.trainer import Trainer
from dtgpt.util.errors import UserError
from dtgpt.util.machine.machine import peak_flops


class Peer:
    """A plain PyTorch training step with the sizes, the tokens and the optimizer's settings of ours: torch.compile,
    TF32 where fp32 is left, AdamW of `optimizer`, clipping at 1. `autocast`: to bf16, for a model in fp32."""

    def __init__(self, recipe: Recipe, ours: Trainer, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.device, self.tokens, self.length = ours.mesh.device, ours.dataset.train, recipe.model.seq_length
        self.batch, self.micro_batches = recipe.micro_batch_size, ours.settings.micro_batches
        self.rate, cuda = recipe.optimizer.lr, self.device.type == "cuda"
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        self.optimizer, narrow = optimizer, next(model.parameters()).dtype != torch.float32
        self.model: nn.Module = torch.compile(model) if cuda else model
        self.autocast = torch.amp.autocast("cuda", torch.bfloat16) if cuda and not narrow else nullcontext()
        self.next = self.draw()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of inputs and targets `[B, T]`."""
        raise NotImplementedError

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
                loss = self.loss(*self.next) / self.micro_batches
            self.next = self.draw()  # while the device works
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach() * self.micro_batches


MakePeers = Callable[[argparse.Namespace, Recipe, Trainer], dict[str, Peer]]


def measure(args: argparse.Namespace, overrides: list[str], make_peers: MakePeers) -> dict[str, dict]:
    """By name: seconds of a step, tokens/s, MFU, loss after the last step, the seconds of each round, and tokens per
    joule where they are asked for."""
    recipe = make_recipe(args, overrides, "single")[0]
    with open_trainer(recipe) as ours:
        torch.manual_seed(recipe.seed)
        device, peers = ours.mesh.device, make_peers(args, recipe, ours)
        steps: dict[str, Callable[[], object]] = {"dtgpt": ours.train_step}
        steps |= {name: peer.step for name, peer in peers.items()}
        for step in steps.values():
            for _ in range(args.warmup):
                step()
        times = alternating(list(steps.values()), args.steps, device)
        losses = [ours.mean_loss(ours.train_step()), *(peer.step().item() for peer in peers.values())]
        tokens, peak = recipe.global_batch_size * recipe.model.seq_length, peak_flops(device, torch.bfloat16)
        found = {}
        for name, rounds, loss in zip(steps, times, losses, strict=True):
            seconds = statistics.median(t for times in rounds for t in times)
            mfu = flops_per_token(recipe.model, recipe.sample_length) * tokens / seconds / peak if peak else None
            found[name] = {"seconds": seconds, "tokens_per_second": tokens / seconds, "mfu": mfu, "loss": loss}
            found[name]["rounds"] = [statistics.median(times) for times in rounds]
        if args.energy:
            counts = {name: max(1, round(args.energy / each["seconds"])) for name, each in found.items()}
            for name, joules in joules_of_steps(steps, counts, device).items():
                found[name] |= {"tokens_per_joule": tokens / joules, "joules": joules}
        return found


def make_parser(description: str, model: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.allow_abbrev = False
    parser.add_argument("--model", default=model, help="as train_step.py takes it")
    parser.add_argument("--micro_batch_size", type=int, default=16)
    parser.add_argument("--micro_batches", type=int, default=1)
    parser.add_argument("--dropout", type=float, help="default: the recipe's")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each")
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--energy", type=float, default=0, help="then measure joules, in turns of so many seconds")
    parser.set_defaults(plans=["single"])
    return parser


def run(parser: argparse.ArgumentParser, make_peers: MakePeers) -> int:
    """Measure what the command line asks for and print it. Return the exit code."""
    args, overrides = parser.parse_known_args()
    if args.energy and not torch.cuda.is_available():
        parser.error(f"--energy {args.energy:g} needs an NVIDIA GPU, whose driver counts energy; leave it out")
    try:
        found = measure(args, overrides, make_peers)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{args.model}, {args.micro_batches} x {args.micro_batch_size} samples a step")
    for name, r in found.items():
        rate = f"{r['tokens_per_second']:,.0f} tokens/s" + (f", {r['mfu']:.1%} MFU" if r["mfu"] else "")
        print(f"{name:<28}{rate:<32}{r['seconds'] * 1e3:.2f} ms a step, loss {r['loss']:.3f}")
        figures = {"tokens/s": r["tokens_per_second"], "ms": 1e3 * r["seconds"], "MFU %": r["mfu"] and 100 * r["mfu"]}
        figures |= {"tokens/J": r.get("tokens_per_joule"), "J a step": r.get("joules"), "loss": r["loss"]}
        note(name, figures, [1e3 * each for each in r["rounds"]])
    ours = found.pop("dtgpt")
    for name, theirs in found.items():
        print(f"dtgpt is {ratio(ours['rounds'], theirs['rounds'])} x as fast as {name}")
        note(f"dtgpt / {name}", ratios(ours["rounds"], theirs["rounds"]))
        if args.energy:
            a, b = ours["tokens_per_joule"], theirs["tokens_per_joule"]
            print(f"a joule trains {a / b:.3f} x as many tokens: {a:.1f} and {b:.1f}")
    return 0

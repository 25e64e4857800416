"""DTensor against tensor parallelism by hand: the blocks of a model, forward and backward, each in one CUDA graph.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --model 345m --micro_batch_size 8

Under the plans tp and tp_sp of as many ranks as there are processes. By hand means plain tensors and Megatron-LM's four
autograd functions (Shoeybi et al. 2019; Korthikanti et al. 2022) in place of DTensor's; everything else is the same
`dtgpt.models.gpt2.Block` with the same weights. `overlapping` also lets the sum of a column's dx run beside its dw, as
Megatron-LM can. Both gradients are compared first. Options not known here are overrides of the recipe.
"""

import argparse
import os
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timing import capture
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from train_step import alternating, make_recipe, ratio

from dtgpt.config.execution import Settings
from dtgpt.models.binding import bind
from dtgpt.models.decoder import Decoder
from dtgpt.models.gpt2 import Block
from dtgpt.ops.kernels.bias import bias_gradient
from dtgpt.ops.random.dropout import dropout_keys
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.parallel.build import build_stages
from dtgpt.parallel.gradients import Sums
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shards
from dtgpt.train.setup import Setup
from dtgpt.train.start import ResumePoint, make_job
from dtgpt.util.errors import UserError
from dtgpt.util.peers import Process

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renames them
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # of gradients, ||a - b|| / ||b||


@dataclass(frozen=True)
class Wire:
    """Between the matrices lie whole activations or, under sequence parallelism, parts of the sequence."""

    group: dist.ProcessGroup
    sequence: bool
    overlap: bool

    def gather(self, x: Tensor) -> Tensor:
        if not self.sequence:
            return x
        ranks = self.group.size()
        parts = x.new_empty(ranks * x.shape[0], *x.shape[1:])
        all_gather(parts, x.contiguous(), group=self.group)
        return parts.unflatten(0, (ranks, -1)).movedim(0, 1).flatten(1, 2)

    def begin_sum(self, x: Tensor) -> tuple[Tensor, dist.Work]:
        """What the sum over the ranks of `x` will be, or this rank's part of it, and the work to wait for."""
        if not self.sequence:
            total = x.contiguous()
            return total, dist.all_reduce(total, group=self.group, async_op=True)
        parts = x.unflatten(1, (self.group.size(), -1)).movedim(1, 0).flatten(0, 1)
        total = parts.new_empty(x.shape[0], *parts.shape[1:])
        return total, reduce_scatter(total, parts, group=self.group, async_op=True)

    def sum(self, x: Tensor) -> Tensor:
        total, work = self.begin_sum(x)
        work.wait()
        return total


class Column(torch.autograd.Function):
    """This rank's columns of a product: the input is gathered, its gradient summed."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, wire: Wire) -> Tensor:
        whole = wire.gather(x)
        ctx.save_for_backward(whole, weight)
        ctx.biased, ctx.wire = bias is not None, wire
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx, dy: Tensor):
        whole, weight = ctx.saved_tensors
        dx, work = ctx.wire.begin_sum(dy @ weight)
        if not ctx.wire.overlap:
            work.wait()
        dw = dy.flatten(0, -2).t() @ whole.flatten(0, -2)
        db = bias_gradient(dy) if ctx.biased else None
        if ctx.wire.overlap:
            work.wait()
        return dx, dw, db, None


class Row(torch.autograd.Function):
    """A product over this rank's rows: the output is summed, its gradient gathered."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, wire: Wire) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.wire = wire
        return wire.sum(F.linear(x, weight))

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        dy = ctx.wire.gather(dy)
        return dy @ weight, dy.flatten(0, -2).t() @ x.flatten(0, -2), None


def write_by_hand(ours: Decoder, dtype: torch.dtype, wire: Wire) -> Decoder:
    """The blocks of `ours` with plain tensors for its DTensors."""
    with torch.device("meta"):
        model = Decoder(ours.config, dtype)
    model.keep(range(ours.config.num_layers), embedding=False, head=False)
    for name, parameter in ours.named_parameters():
        module, _, leaf = name.rpartition(".")
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        setattr(model.get_submodule(module), leaf, nn.Parameter(local.detach().clone()))
    for made, block in zip(model.blocks.values(), ours.blocks.values(), strict=True):
        cut_by_hand(made, block, wire)
    return model


def cut_by_hand(made: Block, block: Block, wire: Wire) -> None:
    made.attn.core = block.attn.core
    for path in ("attn.dropout", "drop_1", "drop_2"):
        bind(made.get_submodule(path), start=block.get_submodule(path).bound.start)
    made.attn.qkv.forward = partial(column, made.attn.qkv, wire, made.attn.qkv.bias)
    made.mlp.fc.forward = partial(column, made.mlp.fc, wire, None)  # GELU adds the bias
    made.attn.proj.forward = partial(row, made.attn.proj, wire)  # the residual stream adds the bias
    made.mlp.proj.forward = partial(row, made.mlp.proj, wire)


def column(module: nn.Linear, wire: Wire, bias: Tensor | None, x: Tensor) -> Tensor:
    return Column.apply(x, module.weight, bias, wire)


def row(module: nn.Linear, wire: Wire, x: Tensor) -> Tensor:
    return Row.apply(x, module.weight, wire)


class Pass:
    """Forward and backward through blocks, to whole gradients of this rank's shards."""

    def __init__(self, model: Decoder, settings: Settings, mesh: Mesh, inputs: tuple[Tensor, Tensor, Tensor | None]):
        self.model, self.mesh = model, mesh
        self.x, self.dy, self.keys = inputs[0].clone().requires_grad_(), *inputs[1:]
        self.shards = Shards([model], mesh, sums=Sums(settings))

    def run(self) -> None:
        self.x.grad = None
        self.shards.drop_gradients()
        self.model(self.x, self.keys).backward(self.dy)
        self.shards.take_gradients()

    def gradients(self) -> dict[str, Tensor]:
        return {"x": self.x.grad} | {s.name: self.shards.gradient(s) for s in self.shards}


def mark_partial(model: Decoder) -> None:
    """Tell `Shards` which gradients are addends under sequence parallelism: those of parameters that every rank holds
    and uses on its part of the sequence."""
    for block in model.blocks.values():
        for norm in (block.ln_1, block.ln_2):
            bind(norm, sums_over_tp=("weight", "bias"))
        for matrix in (block.attn.proj, block.mlp.proj):
            bind(matrix, sums_over_tp=("bias",))


def make_inputs(settings: Settings, mesh: Mesh, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """x and the gradient of the output, [B, T, H] or its part of the sequence, and the dropout keys."""
    config, size, dtype = settings.model, settings.micro_batch_size, settings.dtype
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(size, config.seq_length, config.hidden_size, generator=generator) for _ in range(2))
    if mesh.plan.sequence_parallel:
        x, dy = (t.chunk(mesh.plan.tp, dim=1)[mesh.place.tp] for t in (x, dy))
    key = fold(root_key(seed), "dropout").to(mesh.device)
    samples = torch.arange(size, device=mesh.device)
    keys = dropout_keys(key, samples, config.num_sites) if config.dropout > 0 else None
    return x.to(mesh.device, dtype), dy.to(mesh.device, dtype), keys


def make_passes(settings: Settings, mesh: Mesh, seed: int) -> dict[str, Pass]:
    inputs = make_inputs(settings, mesh, seed)
    stages, _ = build_stages(settings, mesh, fold(root_key(seed), "weights"))
    ours = stages[0]
    ours.keep(range(settings.model.num_layers), embedding=False, head=False)
    models = {"DTensor": ours}
    for name, overlap in (("by hand", False), ("by hand, overlapping", True)):
        wire = Wire(mesh.tp_group, mesh.plan.sequence_parallel, overlap)
        models[name] = write_by_hand(ours, settings.dtype, wire)
        if wire.sequence:
            mark_partial(models[name])
    return {name: Pass(model, settings, mesh, inputs) for name, model in models.items()}


def worst_difference(a: Pass, b: Pass) -> tuple[float, str]:
    """The largest relative difference of a gradient, and which one it is."""
    theirs = b.gradients()
    found = []
    for name, gradient in a.gradients().items():
        ours, other = (t.detach().double().flatten() for t in (gradient, theirs[name]))
        if name.endswith("attn.qkv.bias"):  # that of the keys is rounding alone: the softmax does not see them
            ours, other = (t.view(-1, 3, a.model.blocks["0"].attn.head_dim)[:, [0, 2]] for t in (ours, other))
        found.append((((ours - other).norm() / other.norm()).item(), name))
    return max(found, key=lambda pair: pair[0] if pair[0] == pair[0] else float("inf"))  # a NaN is the worst


def compare(settings: Settings, mesh: Mesh, seed: int, steps: int, warmup: int) -> bool:
    """Check and time one plan; whether the gradients agree."""
    passes, plan = make_passes(settings, mesh, seed), settings.plan.name
    for one in passes.values():
        one.run()
    limit, agreed = TOLERANCE[passes["DTensor"].x.dtype], True
    say = print if mesh.rank == 0 else lambda *_: None
    for name, other in list(passes.items())[1:]:
        difference, where = worst_difference(passes["DTensor"], other)
        fine = not mesh.any(not difference <= limit)
        say(f"{plan}: gradients DTensor and {name}: {difference:.1e} in {where}{'' if fine else ' DIFFER'}")
        agreed = agreed and fine
    runs = [capture(one.run).replay if mesh.device.type == "cuda" else one.run for one in passes.values()]
    for run in runs:
        for _ in range(warmup):
            run()
    times = alternating(runs, steps, mesh.device)
    medians = [[statistics.median(one) for one in rounds] for rounds in times]
    for name, rounds in zip(passes, medians, strict=True):
        line = f"{plan:<10}{name:<22}{statistics.median(rounds) * 1e3:9.3f} ms"
        say(line if name == "DTensor" else f"{line}   DTensor is {ratio(medians[0], rounds)} x as fast")
    return agreed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.allow_abbrev = False
    parser.add_argument("--model", default="345m", help="as train_step.py takes it")
    parser.add_argument("--micro_batch_size", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=40, help="timed passes of each")
    parser.add_argument("--warmup", type=int, default=5)
    parser.set_defaults(micro_batches=1)
    args, overrides = parser.parse_known_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    args.plans = [f"tp{world}", f"tp{world}_sp"]
    if world == 1:
        print(f"one process has nobody to share with; use torchrun --nproc-per-node 2 {Path(sys.argv[0]).name}")
        return 2
    agreed = True
    try:
        with ExitStack() as stack:
            for plan in args.plans:
                job = make_job(make_recipe(args, overrides, plan)[0], ResumePoint(), Process.from_environment().world)
                setup = Setup(job)
                setup.join(stack)
                agreed = compare(setup.settings, setup.mesh, job.recipe.seed, args.steps, args.warmup) and agreed
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if agreed else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread of gloo may outlive its group and abort a process that Python takes apart

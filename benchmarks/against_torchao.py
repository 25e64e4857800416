"""Blocks of GPT-2 in fp8, forward and backward, beside torchao's tensorwise recipe, in turns.

    python benchmarks/against_torchao.py --model 345m --micro_batch_size 16 --layers 6

Ours: `models.gpt2.Block`, in bf16 and in fp8. torchao's: a plain block of the same sizes with biases and SDPA,
compiled, in bf16 and with its four linear maps converted by `convert_to_float8_training`. All are captured as CUDA
graphs; weights and activations are bf16, and there is no dropout. The optimizer, the embedding and the head, which are
the same in all, are left out.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from figures import note
from timing import capture
from torch import Tensor, nn

from dtgpt.models import gpt2
from dtgpt.models.binding import bind
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.layers import Context, DeferredBiasLinear, Linear
from dtgpt.ops.fp8.products import Fp8Product
from dtgpt.ops.fp8.sites import FORMATS, Calibration, Site, Sites

MODELS = {"124m": gpt2.GPT2_124M, "345m": gpt2.GPT2_345M, "774m": gpt2.GPT2_774M, "1558m": gpt2.GPT2_1558M}
CUDA = torch.device("cuda")


class PlainBlock(nn.Module):
    """A block of GPT-2 as one writes it with PyTorch's modules."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln_1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(heads.transpose(1, 2).flatten(-2))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class OurStack(nn.Module):
    """Blocks of ours."""

    def __init__(self, config: GPT2Config, layers: int):
        super().__init__()
        self.blocks = nn.ModuleList(gpt2.Block(config) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, Context())
        return x

    def quantise(self, work: Callable[[], object]) -> None:
        """Give the matrices sites, whose scales follow from one run of `work`, as those of a training run do."""
        matrices = [m for m in self.modules() if isinstance(m, Linear | DeferredBiasLinear)]
        calibration, cells = Calibration(keeps_weights=True), {}
        for matrix in matrices:
            found = [Site(*(torch.zeros((), device=CUDA) for _ in range(3))) for _ in FORMATS]
            bind(matrix, quantised=Fp8Product(Sites(*found, calibration)))
            cells |= {id(site): (site, dtype) for site, dtype in zip(found, FORMATS.values(), strict=True)}
        work()
        for site, dtype in cells.values():
            power = torch.tensor(torch.finfo(dtype).max).frexp().exponent - 2 - site.amax.frexp().exponent
            site.scale.copy_(torch.exp2(power.float()))
            site.inverse.copy_(1 / site.scale)
        calibration.known = True


def plain_stack(config: GPT2Config, layers: int, recipe: str | None) -> nn.Module:
    stack = nn.Sequential(*(PlainBlock(config) for _ in range(layers))).to(CUDA, torch.bfloat16)
    if recipe is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(stack, config=Float8LinearConfig.from_recipe_name(recipe))
    stack.compile(fullgraph=True, dynamic=False)  # whole, so that casts fuse with what is before and after a block
    return stack


def passes(stack: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward; the gradients of the input and of all parameters."""
    inputs = [x, *stack.parameters()]
    return lambda: torch.autograd.grad(stack(x), inputs, dy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="345m", choices=MODELS)
    parser.add_argument("--micro_batch_size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    config = MODELS[args.model]
    shape = args.micro_batch_size, config.seq_length, config.hidden_size
    torch.manual_seed(0)
    x, dy = (torch.randn(shape, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    ours, quantised = (OurStack(config, args.layers).to(CUDA, torch.bfloat16) for _ in range(2))
    quantised.quantise(passes(quantised, x, dy))
    stacks = {"ours, bf16": ours, "ours, fp8": quantised}
    stacks["plain, bf16"] = plain_stack(config, args.layers, None)
    stacks["plain, torchao tensorwise"] = plain_stack(config, args.layers, "tensorwise")
    times: dict[str, list[float]] = {name: [] for name in stacks}
    graphs = {name: capture(passes(stack, x, dy)) for name, stack in stacks.items()}
    for _ in range(args.rounds):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    best = statistics.median(times["ours, fp8"])
    for name, found in times.items():
        middle = statistics.median(found)
        note(name, {"ms a block": middle / args.layers, "x ours in fp8": middle / best}, found)
        print(f"{name:28s}{middle / args.layers:9.4f} ms a block   {middle / best:.3f} x ours in fp8")


if __name__ == "__main__":
    main()

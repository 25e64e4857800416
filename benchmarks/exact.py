"""Log-probabilities that the exact engine reports for the tokens it draws, beside those of training's forward pass.

    python benchmarks/exact.py --model 345m --tokens 1000000
    python benchmarks/exact.py --model llama32_1b --length 1024 --tokens 1000000 --compile
    python benchmarks/exact.py --products

Random weights. Sequences of many lengths start from prompts of 1 to half of the positions and are drawn by greedy and
by random sampling up to the last position; each is then scored by the model's forward pass with gradients, in
micro-batches of several sizes and lengths. What is printed is the number of log-probabilities whose bits differ.
--products compares matrix products of 1 to 16,384 rows in one chain with cuBLAS's.
"""

import argparse
import math
import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from decode_models import MODELS
from torch import Tensor

from dtgpt.config.plan import Plan
from dtgpt.inference.engine import Engine
from dtgpt.inference.request import Request
from dtgpt.inference.sampling import Sampling
from dtgpt.models.binding import bind
from dtgpt.models.decoder import Decoder, build_model
from dtgpt.models.layers import AttentionCore
from dtgpt.ops.decode.blocks import product
from dtgpt.ops.loss.cross_entropy import to_loss_and_gradient_
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel.build import compile_forward
from dtgpt.parallel.mesh import Mesh

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CUDA = torch.device("cuda")
ROWS = (1, 2, 3, 8, 17, 64, 100, 128, 200, 256, 300, 512, 1000, 2048, 4096, 16384)
SIZES = {  # K, N
    "345m": ((1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024), (1024, 50304)),
    "llama32_1b": ((2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048), (2048, 128256)),
    "llama3_8b": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
}


def draw(model: Decoder, dtype: torch.dtype, slots: int, count: int, seed: int) -> list[tuple[list[int], list[float]]]:
    """Return (ids, log-probabilities of the new ones) of sequences that the exact engine draws."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    engine = Engine([model], Mesh(Plan().for_world(1), CUDA), config, dtype, slots, graphs=True, exact=True)
    prompts = {}
    for index in range(count):
        length = int(torch.randint(1, config.seq_length // 2, (1,), generator=generator))
        ids = torch.randint(0, config.vocab_size, (length,), generator=generator).tolist()
        end = config.seq_length if index % 2 else int(torch.randint(length + 1, config.seq_length, (1,)))
        options = Sampling(max_new_tokens=end - length, temperature=(0.0, 1.0, 0.8)[index % 3], ends=False, seed=seed)
        prompts[engine.submit(Request(ids=ids, sampling=options, prompt_index=index))] = (ids, [])
    while engine.busy:
        for event in engine.step():
            prompts[event.request][0].extend(event.ids)
            prompts[event.request][1].extend(event.logprobs)
    engine.release()
    return list(prompts.values())


def trained(model: Decoder, tokens: Tensor) -> Tensor:
    """Return the log-probabilities `[B, T - 1]` of tokens `[B, T]` after the first, by a forward pass of training."""
    logits = model(tokens[:, :-1]).detach().flatten(0, 1)
    scale = torch.ones((), device=tokens.device)
    losses = to_loss_and_gradient_(logits, tokens[:, 1:].flatten(), scale, model.config.vocab_size)
    return -losses.view(len(tokens), -1)


def differing(model: Decoder, drawn: list[tuple[list[int], list[float]]], batch: int, whole: bool) -> tuple[int, int]:
    """Return (tokens, those whose log-probabilities differ). batch: sequences of a micro-batch; whole: padded to all
    positions, else to the longest of the micro-batch."""
    count = wrong = 0
    for first in range(0, len(drawn), batch):
        some = drawn[first : first + batch]
        length = model.config.seq_length + 1 if whole else max(len(ids) for ids, _ in some)
        tokens = torch.zeros(len(some), length, dtype=torch.int64)
        for row, (ids, _) in enumerate(some):
            tokens[row, : len(ids)] = torch.tensor(ids)
        found = trained(model, tokens.to(CUDA)).cpu()
        for row, (ids, logprobs) in enumerate(some):
            expected = found[row, len(ids) - 1 - len(logprobs) : len(ids) - 1]
            wrong += int((expected != torch.tensor(logprobs)).sum())
            count += len(logprobs)
    return count, wrong


def compare_tokens(args: argparse.Namespace) -> None:
    config, dtype = MODELS[args.model], DTYPES[args.dtype]
    config = replace(config, seq_length=args.length or config.seq_length)
    model = build_model(config, CUDA, dtype, root_key(1, CUDA)).to(dtype)
    for core in (module for module in model.modules() if isinstance(module, AttentionCore)):
        bind(core, backend="flash")
    each = config.seq_length // 2
    begin = time.perf_counter()
    drawn = draw(model, dtype, args.slots, math.ceil(args.tokens / each), seed=1)
    print(f"{args.model} {args.dtype}: {time.perf_counter() - begin:.0f} s to draw, {args.slots} slots", flush=True)
    if args.compile:
        compile_forward(model, whole=True)
    for batch, whole in ((8, True),) if args.compile else ((8, True), (1, False), (3, False)):
        some = drawn if batch == 8 else drawn[:: max(1, len(drawn) // 60)]
        count, wrong = differing(model, some, batch, whole)
        shape = f"{batch} of {'all positions' if whole else 'their own length'}"
        print(f"  micro-batches of {shape}: {wrong} of {count:,} log-probabilities differ", flush=True)


def compare_products() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for name, sizes in SIZES.items():
            for size, columns in sizes:
                x = torch.randn(ROWS[-1], size, device=CUDA).to(dtype)
                weight = (torch.randn(columns, size, device=CUDA) / math.sqrt(size)).to(dtype)
                found = {}
                for rows in (rows for rows in ROWS if rows * columns < 1 << 29):
                    part = x[:rows].contiguous()
                    apart = F.linear(part, weight) != product(part, weight, None, "plain", exact=True)
                    found[rows] = apart.float().mean().item()
                told = {rows: f"{share:.1e}" for rows, share in found.items() if share}
                print(f"{name} {dtype} K={size} N={columns}: {told or 'no element differs'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="345m")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--length", type=int, help="positions of the model; none: its own")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--compile", action="store_true", help="compile the forward pass of training")
    parser.add_argument("--products", action="store_true", help="compare matrix products instead")
    args = parser.parse_args()
    if args.products:
        compare_products()
    else:
        compare_tokens(args)


if __name__ == "__main__":
    main()

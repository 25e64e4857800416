"""Log-probabilities that the exact engine reports for the tokens it draws, beside those of training's forward pass.

    python benchmarks/exact.py --model 345m --tokens 1000000
    python benchmarks/exact.py --model llama32_1b --length 1024 --tokens 1000000 --compile
    python benchmarks/exact.py --model olmoe --length 1024 --tokens 1000000
    torchrun --nproc-per-node 2 benchmarks/exact.py --model 345m --plan tp2_sp
    torchrun --nproc-per-node 2 benchmarks/exact.py --model 345m --plan tp2_sp --reduce exact_tp
    python benchmarks/exact.py --products
    python benchmarks/exact.py --narrow

Random weights. Sequences of many lengths start from prompts of 1 to half of the positions and are drawn by greedy and
by random sampling up to the last position; each is then scored by the model's forward pass with gradients, in
micro-batches of several sizes and lengths. What is printed is the number of log-probabilities whose bits differ.
--products compares matrix products of 1 to 16,384 rows in one chain with cuBLAS's, --narrow those of few columns, of
more rows than training computes in one chain.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from decode_models import MODELS
from figures import note
from torch import Tensor

from dtgpt.config.execution import Settings, choose_device
from dtgpt.config.plan_choice import parse_plan
from dtgpt.inference.engine import Engine
from dtgpt.inference.options import Options
from dtgpt.inference.request import PromptJob
from dtgpt.models.batch import Batch
from dtgpt.models.decoder import Decoder
from dtgpt.ops.kernels.decode.blocks import product
from dtgpt.ops.loss.head import _losses_and_gradient_
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel.build import build_stages
from dtgpt.parallel.exact_tp.loss import Rows
from dtgpt.parallel.inference import inference_stages
from dtgpt.parallel.launch import start_process_group
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.peers import Process

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CUDA = torch.device("cuda")
ROWS = (1, 2, 3, 8, 17, 64, 100, 128, 200, 256, 300, 512, 1000, 2048, 4096, 16384)
SIZES = {  # K, N
    "345m": ((1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024), (1024, 50304)),
    "llama32_1b": ((2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048), (2048, 128256)),
    "llama3_8b": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
}

MANY_ROWS = (520, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 8192, 16384)
FEW_COLUMNS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
DEPTHS = (64, 128, 192, 256, 352, 384, 512, 704, 768, 1024, 1536, 2048, 4096, 8192)  # K


def draw(engine: Engine, count: int, seed: int) -> list[tuple[list[int], list[float]]]:
    """Return (ids, log-probabilities of the new ones) of sequences that an engine draws, on every rank."""
    mesh, generator = engine.mesh, torch.Generator().manual_seed(seed)
    if mesh.rank:
        engine.follow()
        return mesh.gather(None)[0]
    prompts, positions = {}, engine.config.seq_length
    for index in range(count):
        length = int(torch.randint(1, positions // 2, (1,), generator=generator))
        ids = torch.randint(0, engine.config.vocab_size, (length,), generator=generator).tolist()
        end = positions if index % 2 else int(torch.randint(length + 1, positions, (1,)))
        options = Options(max_new_tokens=end - length, temperature=(0.0, 1.0, 0.8)[index % 3], ends=False, seed=seed)
        prompts[engine.submit(PromptJob(ids, options, index))] = (ids, [])
    while engine.busy:
        for event in engine.step():
            prompts[event.job][0].extend(event.ids)
            prompts[event.job][1].extend(event.logprobs)
    engine.release()
    return mesh.gather(list(prompts.values()))[0]


def trained(stage: Decoder, batch: Batch) -> Tensor:
    """Return the log-probabilities of the targets of a batch, by a forward pass of training."""
    kept: list[Tensor] = []

    def keeps(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def keep(*arguments: Any) -> Tensor:
            kept.append(function(*arguments))
            return kept[-1]

        return keep

    with (
        mock.patch("dtgpt.ops.loss.head._losses_and_gradient_", keeps(_losses_and_gradient_)),
        mock.patch("dtgpt.parallel.exact_tp.loss.Rows.losses", keeps(Rows.losses)),
    ):
        stage(*batch)
    assert batch.targets is not None
    return -torch.cat(kept).view_as(batch.targets)


def differing(
    stage: Decoder, mesh: Mesh, drawn: list[tuple[list[int], list[float]]], batch: int, whole: bool
) -> tuple[int, int]:
    """Return (tokens, those whose log-probabilities differ). batch: sequences of a micro-batch; whole: padded to all
    positions, else to the longest of the micro-batch."""
    count = wrong = 0
    for first in range(0, len(drawn), batch):
        some = drawn[first : first + batch]
        length = stage.config.seq_length if whole else max(len(ids) for ids, _ in some) - 1
        length += -length % mesh.plan.tp
        tokens = torch.zeros(len(some), length + 1, dtype=torch.int64)
        for row, (ids, _) in enumerate(some):
            tokens[row, : len(ids)] = torch.tensor(ids)
        given = tokens.to(mesh.device)
        found = trained(stage, Batch(given[:, :-1].contiguous(), targets=given[:, 1:].contiguous())).cpu()
        for row, (ids, logprobs) in enumerate(some):
            expected = found[row, len(ids) - 1 - len(logprobs) : len(ids) - 1]
            wrong += int((expected != torch.tensor(logprobs)).sum())
            count += len(logprobs)
    return count, int(mesh.max(wrong))


def open_mesh(plan: str, device: str) -> Mesh:
    """Return the ranks that torchrun started."""
    process = Process.from_environment()
    place = choose_device(device, process.local_rank)
    if process.world > 1:
        start_process_group(place, 600.0)
    return Mesh(parse_plan(plan, {}).for_world(process.world), place)


def compare_tokens(args: argparse.Namespace) -> None:
    config, dtype = MODELS[args.model], DTYPES[args.dtype]
    config, mesh = replace(config, seq_length=args.length or config.seq_length), open_mesh(args.plan, args.device)
    key = root_key(1, mesh.device)
    settings = Settings(
        model=config, plan=mesh.plan, device=mesh.device, dtype=dtype, attention="flash", seq_length=config.seq_length,
        micro_batch_size=8, global_batch_size=8 * mesh.plan.dp, compile=args.compile, reduce=args.reduce,
    )  # fmt: skip
    one = replace(settings, plan=mesh.plan.for_inference(), compile=False)
    drawing = Mesh(one.plan, mesh.device)
    stages = inference_stages(one, drawing, lambda shards: shards.initialize(config, key))
    exact = mesh.device.type == "cuda"
    engine = Engine(stages, drawing, config, dtype, args.slots, graphs=exact, exact=exact)
    begin = time.perf_counter()
    drawn = draw(engine, math.ceil(args.tokens / (config.seq_length // 2)), seed=1)
    say = print if mesh.rank == 0 else (lambda *_, **__: None)
    name = f"{args.model} {args.dtype} {mesh.plan.name} {args.reduce}"
    say(f"{name}: {time.perf_counter() - begin:.0f} s to draw, {args.slots} slots", flush=True)
    (stage,), _ = build_stages(settings, mesh, key)
    for batch, whole in ((8, True),) if args.compile else ((8, True), (1, False), (3, False)):
        some = drawn if batch == 8 else drawn[:: max(1, len(drawn) // 60)]
        count, wrong = differing(stage, mesh, some, batch, whole)
        shape = f"{batch} of {'all positions' if whole else 'their own length'}"
        say(f"  micro-batches of {shape}: {wrong} of {count:,} log-probabilities differ", flush=True)
        if mesh.rank == 0:
            note(f"{name}, micro-batches of {shape}", {"differ": wrong, "log-probabilities": count})
    for each in (drawing, mesh):
        for close in each.before_end:
            close()
    if mesh.world > 1:
        dist.destroy_process_group()


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


def compare_narrow() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        apart = []
        for size in DEPTHS:
            x = torch.randn(MANY_ROWS[-1], size, device=CUDA).to(dtype)
            for columns in FEW_COLUMNS:
                weight = (torch.randn(columns, size, device=CUDA) / math.sqrt(size)).to(dtype)
                chain = product(x, weight, None, "plain", exact=True)
                for rows in MANY_ROWS:
                    if (F.linear(x[:rows].contiguous(), weight) != chain[:rows]).any():
                        apart.append((size, rows * columns, rows, columns))
        total = len(DEPTHS) * len(FEW_COLUMNS) * len(MANY_ROWS)
        print(f"{dtype}: bits differ in {len(apart)} of {total} products", flush=True)
        for size in sorted({one[0] for one in apart}):
            _, _, rows, columns = max(one for one in apart if one[0] == size)
            print(f"  K={size}: the largest has {rows} rows and {columns} columns", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="345m")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--length", type=int, help="positions of the model; none: its own")
    parser.add_argument("--plan", default="single", help="single, tp2 or tp2_sp, of as many processes of torchrun")
    parser.add_argument("--reduce", default="fast", help="of the run whose forward pass it is, such as exact_tp")
    parser.add_argument("--device", default="auto", help="cpu has no exact kernels, so that tokens differ")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--compile", action="store_true", help="compile the forward pass of training")
    parser.add_argument("--products", action="store_true", help="compare matrix products instead")
    parser.add_argument("--narrow", action="store_true", help="compare products of few columns instead")
    args = parser.parse_args()
    if args.products:
        compare_products()
    elif args.narrow:
        compare_narrow()
    else:
        compare_tokens(args)


if __name__ == "__main__":
    main()

"""What context parallel ranks exchange around the attention of a block, forward and backward: by NCCL with the copies
before and behind it, and through memory that the ranks share.

    torchrun --nproc-per-node 2 benchmarks/op_tokens.py
    torchrun --nproc-per-node 2 benchmarks/op_tokens.py --device cpu     # a try of this file, over gloo alone

Attention itself is left out: in its place are tensors that lie ready. A case is replayed as a CUDA graph, the two ways
in turns; the slowest rank counts.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from figures import note
from timing import capture
from torch import Tensor

from dtgpt.config.plan_choice import parse_plan
from dtgpt.parallel.context_parallel import exchange
from dtgpt.parallel.context_parallel.exchange import HeadExchange
from dtgpt.parallel.launch import end_process_group, start_process_group
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shared_memory.all_to_all import TokenExchange
from dtgpt.parallel.shared_memory.arena import share
from dtgpt.parallel.shared_memory.barrier import Barrier
from dtgpt.util.peers import Process

ROUNDS, RUNS = 7, 10
CASES = {  # heads of queries, of keys and values, numbers of a head, tokens of a sample
    "Llama 3.2 1B, 32,768 tokens": (32, 8, 64, 32_768),
    "Llama 3 8B, 32,768 tokens": (32, 8, 128, 32_768),
    "Llama 3 8B, 131,072 tokens": (32, 8, 128, 131_072),
    "GPT-2 345M, 8,192 tokens": (16, 16, 64, 8_192),
}
TINY = {"tiny": (8, 4, 16, 64)}


class Ready(torch.autograd.Function):
    """In place of attention: an output and gradients that lie ready."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, out: Tensor, gradients: tuple[Tensor, ...]):
        ctx.ready = gradients
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return *ctx.ready, None, None


class Case(NamedTuple):
    """The exchanges of a block: q, k and v as parts of one tensor, as a projection gives them."""

    forward: Callable[[], Tensor]
    both: Callable[[], Tensor]  # forward and backward


def make_case(mesh: Mesh, heads: int, groups: int, size: int, tokens: int) -> Case:
    cp, dtype = mesh.plan.cp, torch.bfloat16
    torch.manual_seed(mesh.rank)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, *shape, size, device=mesh.device, dtype=dtype)

    packed = draw(tokens // cp, heads + 2 * groups).requires_grad_()
    out, grad = draw(tokens, heads // cp), draw(tokens // cp, heads)
    gradients = tuple(draw(tokens, n // cp) for n in (heads, groups, groups))
    core = SimpleNamespace(runner=lambda q, k, v, first_head: Ready.apply(q, k, v, out, gradients))
    run = HeadExchange(core, mesh.cp_group)  # type: ignore[arg-type]

    def forward() -> Tensor:
        return run.exchanged(*packed.split([heads, groups, groups], dim=2))

    def both() -> Tensor:
        (found,) = torch.autograd.grad(forward(), packed, grad)
        return found

    return Case(forward, both)


def shared_exchange(mesh: Mesh, heads: int, groups: int, size: int, tokens: int) -> TokenExchange | None:
    cp = mesh.plan.cp
    token_bytes = (heads + 2 * groups) // cp * size * 2
    areas = share(mesh, mesh.cp_group, [TokenExchange.bytes(token_bytes, tokens // cp, cp), Barrier.bytes(cp)])
    return TokenExchange(areas[0], Barrier(areas[1])) if areas else None


def seconds_of(mesh: Mesh, works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each, in turns, of the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            dist.barrier(group=mesh.cp_group)
            synchronize(mesh)
            begin = time.perf_counter()
            for _ in range(RUNS):
                work()
            synchronize(mesh)
            times[name].append((time.perf_counter() - begin) / RUNS)
    return {name: max(mesh.gather(statistics.median(each))) for name, each in times.items()}


def synchronize(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()


def compare(mesh: Mesh, name: str, sizes: tuple[int, int, int, int]) -> None:
    """Check that both ways have the same bits, then print their times."""
    group = mesh.cp_group
    assert group is not None
    made = shared_exchange(mesh, *sizes)
    works: dict[str, Callable[[], object]] = {}
    results, cases = {}, []  # a captured graph reads the memory of its case, which must live
    for way in ("NCCL", "shared memory") if made else ("NCCL",):
        if made and way != "NCCL":
            exchange.shared[group.group_name] = made
        cases.append(case := make_case(mesh, *sizes))
        for what, work in case._asdict().items():
            results[what, way] = work().detach().clone()
            works[f"{what}, {way}"] = capture(work).replay if mesh.device.type == "cuda" else work
        exchange.shared.pop(group.group_name, None)
    same = all(torch.equal(found, results[what, "NCCL"]) for (what, _), found in results.items())
    times = seconds_of(mesh, works)
    heads, groups, size, tokens = sizes
    cp = mesh.plan.cp
    sent = 2 * (2 * heads + 2 * groups) * size * tokens // cp * (cp - 1) // cp  # bytes by a rank in a forward pass
    if mesh.rank == 0:
        print(f"{name}, {mesh.plan.name}: {sent / 1e6:.0f} MB sent forward; same bits: {same}")
        for way, seconds in times.items():
            moved = sent if way.startswith("forward") else 2 * sent
            note(f"{name}, {way}", {"us": seconds * 1e6, "GB/s": moved / seconds / 1e9})
            print(f"  {way:28} {seconds * 1e6:9.1f} us, {moved / seconds / 1e9:6.1f} GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    process = Process.from_environment()
    device = torch.device(args.device, *([process.local_rank] if args.device == "cuda" else []))
    start_process_group(device, 60.0)
    mesh = Mesh(parse_plan(f"cp{process.world}", {}).for_world(process.world), device)
    for name, sizes in (CASES if args.device == "cuda" else TINY).items():
        compare(mesh, name, sizes)
    end_process_group()


if __name__ == "__main__":
    main()

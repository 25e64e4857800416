"""Generated tokens/s beside the bound of memory bandwidth, and beside other ways to generate, in one run.

    python benchmarks/decode.py --model 345m --batches 1 8 64 256 --positions 0 512
    python benchmarks/decode.py --model 1558m --batches 1 --peers dtgpt naive_graph
    python benchmarks/decode.py --model llama32_1b --length 2048 --batches 1 64
    python benchmarks/decode.py --model 345m --batches 64 256 --positions 512 --peers dtgpt exact
    python benchmarks/decode.py --model llama32_1b --length 2048 --batches 1 --peers dtgpt gpt_fast --gpt-fast CHECKOUT
    torchrun --nproc-per-node 2 benchmarks/decode.py --model 345m --plan tp2 --batches 1

Random weights, greedy tokens; the timed ones begin LEAD tokens behind the given position. Of a mixture of experts the
tokens are drawn, and sequences have prompts of their own, since equal ones would choose equal experts. The bound is the
bytes of the weights that a step multiplies and of the keys and values at these positions, over the rate of a large
copy, which is measured in the same run.
Peers take turns; the figures are medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from decode_models import MODELS, bytes_read
from decode_peers import LEAD, EnginePeer, GptFastPeer, NaiveGraphPeer, Peer, TransformersPeer, drain
from figures import note
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.config.plan_choice import parse_plan
from dtgpt.inference import commands
from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.cache import SlotState
from dtgpt.inference.engine import Engine
from dtgpt.inference.options import Options
from dtgpt.inference.request import PromptJob, variant_of
from dtgpt.inference.scheduler import LONGEST_ROUND
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel.cache_sizes import bytes_per_slot
from dtgpt.parallel.inference import inference_stages
from dtgpt.parallel.launch import end_process_group, start_process_group
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.hardware import environment
from dtgpt.util.peers import Process
from tests.support.whole_model import build_model

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
USUAL = ("dtgpt", "naive_graph", "hf_compiled", "hf_eager")  # peers, where none are named
PEERS = (*USUAL, "exact", "gpt_fast")  # the engine with `exact`: on a GPU; --gpt-fast
HEADS = ["batch", "position", "peer", "ms a token", "tokens/s", "of bound", "of dtgpt"]
TIMEOUT = 600.0  # s that a rank waits for others


def copy_rate(device: torch.device) -> float:
    """Bytes per second that a large copy moves, read and written."""
    source = torch.ones(1 << (30 if device.type == "cuda" else 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_time(lambda: target.copy_(source), device, rounds=20)


def median_time(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median of the seconds of `work`, after one run that is not counted."""
    times = []
    for _ in range(rounds + 1):
        drain(device)
        begin = time.perf_counter()
        work()
        drain(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def make_engine(args: argparse.Namespace, device: torch.device, exact: bool = False) -> Engine:
    """An engine under a plan, with random weights: the parts that `dtgpt.load` puts together."""
    config, dtype, slots = args.config, DTYPES[args.dtype], args.slots or max(args.batches)
    plan = parse_plan(args.plan, {}).for_world(Process.from_environment().world).for_inference()
    settings = Settings(
        model=config, plan=plan, device=device, dtype=dtype, seq_length=config.seq_length, micro_batch_size=1,
        global_batch_size=plan.dp * 2 * plan.pp,
    )  # fmt: skip
    mesh = Mesh(plan, device)
    stages = inference_stages(settings, mesh, lambda shards: shards.initialize(config, root_key(1)))
    return Engine(stages, mesh, config, dtype, slots, graphs=args.graph == "on", exact=exact)


def make_peers(args: argparse.Namespace, engine: Engine, device: torch.device) -> dict[str, Peer]:
    config, dtype = args.config, DTYPES[args.dtype]
    apart = isinstance(config, ExpertsConfig)
    drawn = {"temperature": 1.0 if apart else 0.0}
    makers: dict[str, Callable[[], Peer]] = {
        "dtgpt": partial(EnginePeer, engine, **drawn, apart=apart),
        "exact": lambda: EnginePeer(make_engine(args, device, exact=True), **drawn, apart=apart),
        "naive_graph": partial(NaiveGraphPeer, config, device, dtype),
        "hf_compiled": partial(TransformersPeer, config, device, dtype, static=True, **drawn),
        "hf_eager": partial(TransformersPeer, config, device, dtype, static=False, **drawn),
        "gpt_fast": partial(GptFastPeer, args.gpt_fast, config, device, dtype),
    }
    return {name: makers[name]() for name in PEERS if name in args.peers}


def compare(peers: dict[str, Peer], prompt: list[int], batch: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each peer, by round; peers take turns."""
    with ExitStack() as stack:
        for peer in peers.values():
            peer.prepare(prompt, batch, tokens)
            stack.callback(peer.close)
            peer.step_time()
        found = [{name: peer.step_time() for name, peer in peers.items()} for _ in range(rounds)]
    return {name: [times[name] for times in found] for name in peers}


def measure_decode(args: argparse.Namespace, engine: Engine, rate: float) -> list[dict]:
    """A row of results for each batch, position and peer."""
    config, dtype, device = args.config, DTYPES[args.dtype], engine.mesh.device
    peers = make_peers(args, engine, device)
    results = []
    for position in args.positions:
        prompt = torch.arange(position + 1).remainder(config.vocab_size).tolist()
        for batch in args.batches:
            bound = batch * rate / bytes_read(config, dtype, batch, position + LEAD + args.tokens / 2)
            for name, times in compare(peers, prompt, batch, args.tokens, args.rounds).items():
                speed = batch / statistics.median(times)
                row = {"batch": batch, "position": position, "peer": name, "seconds": times, "tokens_per_second": speed}
                results.append(row | {"bound": bound, "of_bound": speed / bound})
                print(line(results[-1], results), flush=True)
                hand_over(results[-1])
    return results


def line(row: dict, results: list[dict]) -> str:
    """A row of the table."""
    ours = next(
        (r for r in results if r["peer"] == "dtgpt" and all(r[k] == row[k] for k in ("batch", "position"))), None
    )
    cells = [str(row["batch"]), str(row["position"]), row["peer"], f"{statistics.median(row['seconds']) * 1e3:.3f}"]
    cells += [f"{row['tokens_per_second']:,.0f}", f"{row['of_bound']:.1%}"]
    cells += [f"{row['tokens_per_second'] / ours['tokens_per_second']:.2f}" if ours else "-"]
    return "".join(cell.rjust(13) for cell in cells)


def hand_over(row: dict) -> None:
    """Hand the figures of a row to all.py."""
    rounds = [1e3 * each for each in row["seconds"]]
    figures = {
        "ms": statistics.median(rounds),
        "tokens/s": row["tokens_per_second"],
        "of bound %": 100 * row["of_bound"],
    }
    note(f"{row['peer']}, {row['batch']} at {row['position']}", figures, rounds)


def measure_rounds(args: argparse.Namespace, engine: Engine) -> list[dict]:
    """For each batch the seconds of a step, without the scheduler: of the host, where a round is queued on an idle
    device, and in all, where rounds are queued back to back."""
    device, sampling, results = engine.mesh.device, Options(temperature=0.0), []
    variant, count = variant_of([sampling]), args.tokens // LONGEST_ROUND
    payload = SlotState.encode([0] * (args.positions[0] + 1), sampling, SpecialIds(), 0, 0)
    for batch in args.batches:
        hosts, totals = [], []
        for _ in range(args.rounds + 1):
            for slot in range(batch):
                engine.command(commands.begin, slot, payload)
            drain(device)
            begin = time.perf_counter()
            engine.command(commands.decode, range(batch), LONGEST_ROUND, variant)
            hosts.append((time.perf_counter() - begin) / LONGEST_ROUND)
            drain(device)
            begin = time.perf_counter()
            for _ in range(count):
                engine.command(commands.decode, range(batch), LONGEST_ROUND, variant)
            drain(device)
            totals.append((time.perf_counter() - begin) / LONGEST_ROUND / count)
        host, total = statistics.median(hosts[1:]), statistics.median(totals[1:])
        results.append({"batch": batch, "host": host, "step": total})
        print(f"rounds of batch {batch}: {total * 1e3:.3f} ms a step, of the host {host * 1e3:.3f} ms")
    return results


@torch.no_grad()
def measure_prefill(args: argparse.Namespace, engine: Engine) -> dict[str, float]:
    """Tokens/s of prompts that fill the model: submitted at once, up to the first token of each; one after the other;
    and of the training forward over the same number of sequences, with and without its loss."""
    config, dtype, device = args.config, DTYPES[args.dtype], engine.mesh.device
    length, sequences = config.seq_length, args.prefill
    request = PromptJob([0] * (length - 1), Options(temperature=0.0, max_new_tokens=1))
    ids = torch.arange(length).remainder(config.vocab_size)
    model = build_model(config, device, dtype, root_key(1)).to(dtype)
    batch = ids.to(device).repeat(sequences, 1)

    def submitted() -> None:
        for _ in range(sequences):
            engine.submit(request)
        while engine.busy:
            engine.step()

    def alone() -> None:
        for _ in range(sequences):
            engine.command(commands.read, [0], [ids.tolist()], 0)

    def forward(targets: Tensor | None) -> float:
        work = replayed(lambda: model(batch, targets=targets), device)
        return sequences * length / median_time(work, device, args.rounds)

    works = {"prefill": submitted, "prefill_alone": alone}
    rates = {name: sequences * length / median_time(work, device, args.rounds) for name, work in works.items()}
    return rates | {"forward": forward(None), "forward_and_loss": forward(batch)}


def replayed(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`work` as a CUDA graph, as training replays it; on a CPU as it is."""
    if device.type != "cuda":
        return work
    work()  # before the capture: kernels are built
    drain(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def measure_memory(args: argparse.Namespace, engine: Engine, before: int) -> dict[str, float]:
    """GiB that the engine takes as planned, and the peak since `before` bytes were allocated."""
    config, dtype, plan = args.config, DTYPES[args.dtype], engine.mesh.plan
    slots = (engine.slots + 1) * bytes_per_slot(config, plan, dtype)
    planned = config.num_parameters * dtype.itemsize / (plan.tp * plan.pp) + slots
    cuda = engine.mesh.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() - before if cuda else float("nan")
    return {"planned": planned / 2**30, "peak": peak / 2**30}


def run(args: argparse.Namespace, device: torch.device) -> dict:
    """All measurements, on rank 0."""
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    engine = make_engine(args, device)
    if engine.mesh.rank > 0:
        engine.follow()
        return {}
    rate = copy_rate(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    print(f"{args.model}, {args.dtype}, plan {args.plan}; a copy moves {rate / 1e12:.2f} TB/s")
    print("".join(head.rjust(13) for head in HEADS))
    warm_up(args, engine)
    memory = measure_memory(args, engine, before)
    results: dict = {"copy_rate": rate, "decode": measure_decode(args, engine, rate), "memory": memory}
    results["rounds"] = measure_rounds(args, engine)
    print(f"memory of the engine: {memory['planned']:.3f} GiB planned, {memory['peak']:.3f} GiB at most")
    if args.prefill:
        results["prefill"] = rates = measure_prefill(args, engine)
        print(", ".join(f"{name} {value:,.0f} tokens/s" for name, value in rates.items()))
        note("prefill", {f"{name} tokens/s": value for name, value in rates.items()})
    engine.release()
    return results | {"model": args.model, "plan": args.plan, "dtype": args.dtype, "environment": environment(device)}


def warm_up(args: argparse.Namespace, engine: Engine) -> None:
    """Work on every batch size once, at the last position that is asked for."""
    peer = EnginePeer(engine)
    for batch in args.batches:
        peer.prepare([1] * (max(args.positions) + 1), batch, args.tokens)
        peer.step_time()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="345m", choices=MODELS)
    parser.add_argument("--length", type=int, default=0, help="positions of a slot; default: the model's")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument(
        "--plan", default="single", help="under torchrun, such as tp2 or pp2, with the peer dtgpt alone"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--graph", default="on", choices=("on", "off"), help="CUDA graphs of the engine's steps")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256], help="numbers of sequences")
    parser.add_argument("--positions", type=int, nargs="+", default=[0, 512], help="tokens before the first timed ones")
    parser.add_argument("--peers", nargs="+", default=list(USUAL), choices=PEERS)
    parser.add_argument("--gpt-fast", type=Path, help="checkout of gpt-fast, for the peer gpt_fast (LLaMA)")
    parser.add_argument("--tokens", type=int, default=128, help="timed steps of a measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each peer")
    parser.add_argument("--slots", type=int, default=0, help="of the engine; default: the largest batch")
    parser.add_argument("--prefill", type=int, default=16, help="prompts of the measurement of prefill; 0: none")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    if args.tokens < LONGEST_ROUND:
        parser.error(f"--tokens {args.tokens} is less than a round; use {LONGEST_ROUND} or more")
    args.config = MODELS[args.model]
    if "gpt_fast" in args.peers and not (args.gpt_fast and args.config.architecture == "llama"):
        parser.error("the peer gpt_fast needs --gpt-fast CHECKOUT and a --model of LLaMA")
    if args.length:
        args.config = replace(args.config, seq_length=args.length)
    needed, there = max(args.positions) + 1 + LEAD + args.tokens, args.config.seq_length
    if needed > there:
        parser.error(f"position {max(args.positions)} and {args.tokens} tokens need {needed} positions of {there}")
    return args


def main() -> int:
    args, process = parse(), Process.from_environment()
    if process.world > 1:
        args.peers = ["dtgpt"]
    device = torch.device(args.device, process.local_rank) if args.device == "cuda" else torch.device("cpu")
    if process.world > 1:
        start_process_group(device, TIMEOUT)
    try:
        results = run(args, device)
    finally:
        if process.world > 1:
            end_process_group()
    if results and args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Building the index of samples of one large dataset: time and memory, ours and Megatron-LM's.

    python benchmarks/index_build.py --documents 10000000 --epochs 3 --seq_length 1024
    python benchmarks/index_build.py --megatron PATH            (a checkout, whose helpers are built)
    python benchmarks/index_build.py --samples 10000000 --blend 5 [--megatron PATH]      (the order of a blend)

Every build has a fresh process, which draws the documents' lengths before the clock starts. Memory is what the build
adds at its peak. Megatron-LM's part is its own functions for the three indices, called as its GPTDataset does. Its
helpers must be built: `make -C PATH/megatron/core/datasets`, with pybind11. The digest is of all values.
"""

import argparse
import hashlib
import importlib
import json
import os
import resource
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
from figures import note

from dtgpt.data.megatron.blend import blend_order
from dtgpt.data.megatron.samples import build_sample_index, count_epochs

SEED = 1234


def ours(lengths: np.ndarray, seq_length: int, samples: int) -> list[np.ndarray]:
    index = build_sample_index(lengths, range(len(lengths)), seq_length, samples, SEED)
    return [index.document_index, index.sample_index, index.shuffle_index]


def megatron(lengths: np.ndarray, seq_length: int, samples: int) -> list[np.ndarray]:
    """Its own functions, in the order of GPTDataset._build_document_sample_shuffle_indices."""
    gpt_dataset = importlib.import_module("megatron.core.datasets.gpt_dataset")
    helpers = importlib.import_module("megatron.core.datasets.helpers")
    documents = np.arange(len(lengths), dtype=np.int32)
    tokens = int(np.sum(lengths[documents]))
    epochs = count_epochs(tokens, seq_length, samples)
    rng = np.random.RandomState(SEED)
    apart = epochs.samples_apart is not None
    document_index = gpt_dataset._build_document_index(documents, epochs.count, rng, apart)
    sample_index = helpers.build_sample_idx(
        lengths.copy(), document_index, seq_length, epochs.count, tokens, True, True
    )
    count = len(sample_index) - 1
    shuffle_index = gpt_dataset._build_shuffle_index(epochs.samples_apart if apart else count, count, rng)
    return [document_index, sample_index, shuffle_index]


def megatron_blend(weights: list[float], size: int) -> list[np.ndarray]:
    helpers = importlib.import_module("megatron.core.datasets.helpers")
    order = [np.zeros(size, np.int16), np.zeros(size, np.int64)]
    helpers.build_blending_indices(*order, weights, len(weights), size, False)
    return order


def import_megatron(checkout: Path) -> None:
    """Its modules of data, without running the package's __init__, which imports everything and needs Triton."""
    sys.path.insert(0, str(checkout))
    core = types.ModuleType("megatron.core")
    core.__path__ = [str(checkout / "megatron" / "core")]
    sys.modules["megatron.core"] = core
    for name in ("parallel_state", "datasets.gpt_dataset", "datasets.helpers"):
        importlib.import_module(f"megatron.core.{name}")


def make_work(options: argparse.Namespace) -> Callable[[], list[np.ndarray]]:
    """Everything that comes before the clock starts."""
    rng = np.random.default_rng(0)
    if options.only == "megatron":
        import_megatron(Path(options.megatron))
    if options.blend:
        weights = rng.dirichlet(np.ones(options.blend)).tolist()
        order = blend_order if options.only == "ours" else megatron_blend
        return lambda: order(weights, options.samples)
    lengths = rng.integers(options.shortest, options.longest + 1, options.documents, dtype=np.int32)
    every = (options.epochs * int(lengths.sum(dtype=np.int64)) - 1) // options.seq_length
    samples = options.samples or every
    build = ours if options.only == "ours" else megatron
    return lambda: build(lengths, options.seq_length, samples)


def memory(field: str) -> int:
    """Bytes: VmRSS now or VmHWM, the peak since `reset_peak`; elsewhere than on Linux the peak of the process."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("the peak of memory includes what came before the build", file=sys.stderr)


def measure(options: argparse.Namespace) -> dict:
    work = make_work(options)
    reset_peak()
    before = memory("VmRSS")
    begin, cpu = time.perf_counter(), time.process_time()
    arrays = work()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    peak = memory("VmHWM")
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).data)
    return {
        "seconds": seconds, "cpu": cpu, "added": peak - before, "peak": peak, "digest": digest.hexdigest()[:16],
        "arrays": [f"{a.dtype} {list(a.shape)}" for a in arrays],
    }  # fmt: skip


def in_fresh_process(which: str) -> dict:
    command = [sys.executable, __file__, *sys.argv[1:], "--only", which]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{which} did not build the index:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--shortest", type=int, default=10, help="tokens of a document")
    parser.add_argument("--longest", type=int, default=900)
    parser.add_argument("--epochs", type=int, default=3, help="of which all samples are asked for")
    parser.add_argument("--samples", type=int, default=0, help="asked for instead; of a blend: its length")
    parser.add_argument("--seq_length", type=int, default=1024)
    parser.add_argument("--blend", type=int, default=0, help="build the order of a blend of so many datasets")
    parser.add_argument("--rounds", type=int, default=3, help="in turns; the fastest counts")
    parser.add_argument("--megatron", help="a checkout of Megatron-LM")
    parser.add_argument("--only", choices=["ours", "megatron"], help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.only:
        print(json.dumps(measure(options)))
        return
    names = ["ours", *(["megatron"] if options.megatron else [])]
    rounds = [{name: in_fresh_process(name) for name in names} for _ in range(options.rounds)]
    best = {name: min((r[name] for r in rounds), key=lambda result: result["seconds"]) for name in names}
    for name, r in best.items():
        note(name, {"s": r["seconds"], "MiB": r["added"] / 2**20})
        spread = f"{r['seconds']:.2f}-{max(x[name]['seconds'] for x in rounds):.2f} s"
        memory_ = f"adds {r['added'] / 2**20:.0f} MiB at its peak ({r['peak'] / 2**20:.0f} MiB in all)"
        print(f"{name:9s} {spread}, {r['cpu']:.2f} s of CPU, {memory_}; {', '.join(r['arrays'])}; {r['digest']}")
    if options.megatron:
        ratio = {key: best["ours"][key] / best["megatron"][key] for key in ("seconds", "cpu", "added")}
        same = "the same values" if best["ours"]["digest"] == best["megatron"]["digest"] else "OTHER VALUES"
        text = ", ".join(f"{key} {value:.2f}" for key, value in ratio.items())
        print(f"ours over Megatron-LM's: {text}; {same}")


if __name__ == "__main__":
    main()

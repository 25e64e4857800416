"""How much memory, and time, reading random samples of a large dataset takes.

    python benchmarks/mapped_memory.py --gib 2

Random tokens are written to a .bin of that size, no byte of it left out, in a temporary folder. Then batches of samples
are read through the classes that training uses, in the order of training. Memory is what reading adds to the process
(Linux): all of it at its peak, mapped pages included, and its anonymous part, which is not pages of a file. Exit
code 1 where the peak is above the bound.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from index_build import memory, reset_peak

from dtgpt.data.megatron.indexed import IndexedDataset, IndexedWriter
from dtgpt.data.megatron.samples import SampleRequest, Samples, load_samples

BLOCK = 1 << 22  # tokens written together
SEED = 1234


def write(prefix: Path, num_bytes: int) -> None:
    rng = np.random.default_rng(SEED)
    with IndexedWriter(prefix, np.uint16) as writer:
        for begin in range(0, num_bytes // 2, BLOCK):
            count = min(BLOCK, num_bytes // 2 - begin)
            ends = np.unique([*rng.integers(0, count, count // 450), count])  # documents of 450 tokens on average
            writer.extend(rng.integers(0, 50257, count, np.uint16), np.diff(ends, prepend=0))


def read(samples: Samples, count: int, batch: int) -> tuple[float, int]:
    """(seconds, the largest anonymous memory of the process in bytes)."""
    seconds, anonymous = 0.0, 0
    for first in range(0, count, batch):
        ids = np.arange(first, min(first + batch, count)) % len(samples)
        begin = time.perf_counter()
        samples.windows(ids)
        seconds += time.perf_counter() - begin
        anonymous = max(anonymous, memory("RssAnon"))
    return seconds, anonymous


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the .bin")
    parser.add_argument("--windows", type=int, default=50_000, help="samples to read")
    parser.add_argument("--batch", type=int, default=32, help="samples read together")
    parser.add_argument("--seq_length", type=int, default=1024)
    parser.add_argument("--bound_mib", type=float, default=32.0, help="of what reading adds at its peak")
    parser.add_argument("--folder", help="in which a temporary one is made; else the system's")
    return parser.parse_args()


def main() -> int:
    options = parse()
    if not Path("/proc/self/status").exists():
        print("memory cannot be told apart here; run it on Linux", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        prefix = Path(folder) / "random"
        write(prefix, int(options.gib * 2**30))
        samples = load_samples(IndexedDataset(prefix), SampleRequest(None, "train", options.seq_length, None, SEED))
        samples.windows(np.arange(min(2, len(samples))))  # what is set up once
        reset_peak()
        before, before_anonymous = memory("VmRSS"), memory("RssAnon")
        seconds, anonymous = read(samples, options.windows, options.batch)
        added = (memory("VmHWM") - before) / 2**20
    anonymous_added = (anonymous - before_anonymous) / 2**20
    verdict = "within" if added <= options.bound_mib else "ABOVE"
    print(
        f"{options.gib:g} GiB, {options.windows:,} windows of {options.seq_length}: "
        f"{options.windows / seconds:,.0f} windows/s; at its peak reading adds {added:.0f} MiB, {anonymous_added:.0f} "
        f"MiB of it anonymous: {verdict} {options.bound_mib:g} MiB"
    )
    return 0 if verdict == "within" else 1


if __name__ == "__main__":
    sys.exit(main())

"""How long a run takes from its start to the end of its first steps: with empty caches of compiled code, then with full
ones.

    python benchmarks/first_step.py recipes/gpt2_345m.py --data.tokenizer bytes
    python benchmarks/first_step.py recipes/gpt2_tiny.py --device cpu --starts 2

More options are those of `dtgpt train`. A run ends after four steps: the first ones compile kernels and capture graphs.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import note

CACHES = ("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
STEPS = 4
QUIET = {"steps": STEPS, "log.interval": 1, "log.eval_interval": 0, "log.sample_tokens": 0, "checkpoint.interval": 0}


def seconds_to_steps(recipe: str, options: list[str], folder: Path) -> list[float]:
    """Return the seconds from the start of a process to the line of each step. Raises RuntimeError where it fails."""
    caches = {name: str(folder / name.lower()) for name in CACHES}
    words = [word for name, value in {**QUIET, "runs": folder / "runs"}.items() for word in (f"--{name}", str(value))]
    begin, found, output = time.monotonic(), [], []
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "dtgpt", "train", recipe, *words, *options],
        env={**os.environ, **caches}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        if re.match(rf"step \d+/{STEPS} ", line):
            found.append(time.monotonic() - begin)
    if process.wait() or len(found) < STEPS:
        raise RuntimeError("".join(output))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.allow_abbrev = False
    parser.add_argument("recipe")
    parser.add_argument("--starts", type=int, default=3, help="the first with empty caches")
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        for start in range(args.starts):
            try:
                found = seconds_to_steps(args.recipe, options, Path(folder))
            except RuntimeError as error:
                print(error, file=sys.stderr)
                return 1
            steps = ", ".join(f"{seconds:.1f}" for seconds in found)
            note("full caches" if start else "empty caches", {f"s to step {n}": s for n, s in enumerate(found, 1)})
            print(f"{'full' if start else 'empty'} caches: seconds from the start to steps 1 to {STEPS}: {steps}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How long a run takes from its start to the end of its first steps, and where the time goes: with empty caches of
compiled code, then with full ones.

    python benchmarks/first_step.py recipes/gpt2_345m.py --data.tokenizer bytes
    python benchmarks/first_step.py recipes/gpt2_345m.py --data.tokenizer bytes --phases --stacks stacks.txt
    python benchmarks/first_step.py recipes/gpt2_345m.py --data.tokenizer bytes --trees ../old .    # in turns
    python benchmarks/first_step.py recipes/gpt2_tiny.py --device cpu --starts 2

More options are those of `dtgpt train`. A run ends after four steps: the first ones compile kernels and capture graphs.
Python's bytecode is there at each start, as it is after `pip install`: it is compiled before, into a folder of its own.

--phases looks at the stack of the main thread a hundred times a second. What holds the interpreter's lock meanwhile,
such as the loading of a library, counts as where the next look finds the thread.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from figures import note

CACHES = ("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
PACKAGES = (
    *("torch", "torchgen", "functorch", "triton", "sympy", "mpmath", "networkx", "numpy", "safetensors", "packaging"),
    *("jinja2", "fsspec", "setuptools", "matplotlib", "PIL"),
)
STEPS = 4
QUIET = {"steps": STEPS, "log.interval": 1, "log.eval_interval": 0, "log.sample_tokens": 0, "checkpoint.interval": 0}
SHORTEST = 0.02  # seconds of a stack that is listed

# Runs `dtgpt` with the words behind the first, which is the file for what was seen.
WATCHED = """
import atexit, json, runpy, sys, threading, time
main, file, places, seen, over = threading.main_thread().ident, sys.argv[1], {}, [], threading.Event()

def name(frame):
    path = frame.f_code.co_filename.rpartition("site-packages/")[2]
    return "/".join(path.rsplit("/", 4)[-4:]) + ":" + frame.f_code.co_name

def watch():
    last = time.monotonic()
    while not over.wait(0.01):
        frame, names = sys._current_frames().get(main), []
        now = time.monotonic()
        while frame is not None:
            names.append(name(frame))
            frame = frame.f_back
        stack = ";".join(n for n in reversed(names) if not n.startswith("<frozen") or n.endswith("find_and_load"))
        seen.append((now, places.setdefault(stack, len(places)), now - last))
        last = now

def write():
    over.set()
    thread.join()
    json.dump({"stacks": list(places), "seen": seen}, open(file, "w"))

atexit.register(write)
thread = threading.Thread(target=watch, daemon=True)
thread.start()
sys.argv[:] = ["dtgpt", *sys.argv[2:]]
runpy.run_module("dtgpt", run_name="__main__", alter_sys=True)
"""

# What the time of a stack is told under: the first name whose pattern is in the stack.
PHASES = [
    ("Triton: launchers, by the C compiler", r"triton/runtime/build|make_launcher|compile_module_from_src"),
    ("Triton: kernels compiled", r"triton/compiler/compiler.py:compile\b.*(:make_ir|:compile_ir|:make_|<lambda>)"),
    ("Triton: kernels loaded", r"_init_handles|load_binary|triton/compiler|rehears"),
    ("Triton: other", r"triton/runtime|triton/backends"),
    ("CUDA C++ built", r"ops/kernels/extension.py"),
    ("imports: torch._dynamo, torch._inductor", r"find_and_load;[^;]*torch/(_dynamo|_inductor)/"),
    ("imports: triton", r"find_and_load;[^;]*triton/"),
    ("imports: sympy, torch.fx", r"find_and_load;[^;]*(sympy/|torch/fx/)"),
    ("imports: torch.distributed", r"find_and_load;[^;]*torch/distributed/"),
    ("imports: torch", r"find_and_load;[^;]*torch/"),
    ("imports: others", r"find_and_load"),
    ("CUDA started", r"torch/cuda/[^;]*(_lazy_init|is_available|device_count|get_device)"),
    ("text and samples", r":read_dataset"),
    ("weights", r":initialize;|:initialize$|fill_weight"),
    ("model laid out", r":build_stages|:lay_out_stage"),
    ("optimizer and states", r"optim/update.py:__init__"),
    ("graphs captured", r"parallel/graphs/captured.py:capture"),
    ("forward and backward", r"trainer.py:gradients"),
    ("update", r"trainer.py:update"),
    ("report", r"run/report.py|run/folder.py|run/records.py"),
    ("waiting for the GPU", r":mean_loss|:item\b"),
]


class Start(NamedTuple):
    """What was seen of a start."""

    losses: list[str]
    steps: list[float]  # seconds from the start of the process to the line of each step
    stacks: Counter[tuple[int, str]]  # seconds by the number of steps that were done, and the stack


def compile_sources(folder: Path, trees: list[Path]) -> None:
    """Write the bytecode of the trees, and of what they import of Python and its packages, into a folder."""
    found = [importlib.util.find_spec(name) for name in PACKAGES]
    packages = [place for spec in found if spec is not None for place in spec.submodule_search_locations or ()]
    for places, left_out in (
        ([*packages, *(str(tree / "dtgpt") for tree in trees)], r"/(tests?|testing)/"),
        ([sysconfig.get_paths()["stdlib"]], r"/(site-packages|dist-packages|test|idlelib|lib2to3)/"),
    ):
        words = [sys.executable, "-m", "compileall", "-q", "-j", "0", "-x", left_out, *places]
        subprocess.run(words, env=with_bytecode(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def with_bytecode(folder: Path) -> dict[str, str]:
    """Return the environment of a process whose bytecode is in a folder: some images forbid to write any."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def start(recipe: str, options: list[str], folder: Path, bytecode: Path, tree: Path | None, watched: bool) -> Start:
    """Start a run, whose caches are in `folder`, with the code of `tree`. Raises RuntimeError where it fails."""
    environment = {**with_bytecode(bytecode), **{name: str(folder / name.lower()) for name in CACHES}}
    if tree is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [word for name, value in {**QUIET, "runs": folder / "runs"}.items() for word in (f"--{name}", str(value))]
    seen = folder / "seen.json"
    program = ["-c", WATCHED, str(seen)] if watched else ["-m", "dtgpt"]
    begin, found, losses, output = time.monotonic(), list[float](), list[str](), list[str]()
    process = subprocess.Popen(
        [sys.executable, "-u", *program, "train", recipe, *words, *options],
        env=environment, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        if re.match(rf"step \d+/{STEPS} ", line):
            found.append(time.monotonic() - begin)
            losses += re.findall(r"loss (\S+)", line)[:1]
    if process.wait() or len(found) < STEPS:
        raise RuntimeError("".join(output))
    stacks: Counter[tuple[int, str]] = Counter()
    if watched:
        told = json.loads(seen.read_text())
        first, _, rest = told["seen"][0]
        stacks[0, "before Python runs dtgpt"] = first - rest - begin
        for when, place, seconds in told["seen"]:
            stacks[sum(when - begin > step for step in found), told["stacks"][place]] += seconds
    return Start(losses, found, stacks)


def phases_of(found: Start) -> dict[str, list[float]]:
    """Return the seconds of each phase, by the number of steps that were done before."""
    seconds: dict[str, list[float]] = {}
    for (done, stack), spent in found.stacks.items():
        name = next((name for name, pattern in PHASES if re.search(pattern, stack)), "other")
        name = stack if ";" not in stack and ":" not in stack else name
        seconds.setdefault(name, [0.0] * (STEPS + 1))[done] += spent
    return dict(sorted(seconds.items(), key=lambda each: -sum(each[1])))


def print_phases(found: Start) -> None:
    print("    seconds until step 1, until each further one, and to the end")
    for name, seconds in phases_of(found).items():
        if sum(seconds) >= SHORTEST:
            print(f"    {name:42}" + "".join(f"{each:8.2f}" for each in seconds))


def list_stacks(found: Start, title: str, file: Path) -> None:
    """Add the stacks that took longest to a file, a line each: seconds, steps that were done, frames."""
    with file.open("a") as out:
        print(f"== {title}", file=out)
        for (done, stack), spent in found.stacks.most_common():
            if spent >= SHORTEST:
                print(f"{spent:.2f} {done} {stack}", file=out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.allow_abbrev = False
    parser.add_argument("recipe", help="relative to each tree, where --trees is given")
    parser.add_argument("--starts", type=int, default=3, help="the first with empty caches")
    parser.add_argument("--phases", action="store_true", help="print where the time goes")
    parser.add_argument("--stacks", type=Path, help="file for the stacks that took longest; needs --phases")
    parser.add_argument("--trees", type=Path, nargs="+", help="folders with other versions of the code, in turns")
    args, options = parser.parse_known_args()
    trees = args.trees or [None]
    taken: dict[tuple[Path | None, bool], list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        bytecode = Path(folder, "bytecode")
        begin = time.monotonic()
        compile_sources(bytecode, [tree.resolve() for tree in args.trees or [Path(__file__).parents[1]]])
        print(f"bytecode: {time.monotonic() - begin:.1f} s", flush=True)
        for number in range(args.starts):
            for place in range(len(trees)) if number % 2 == 0 else reversed(range(len(trees))):
                own, tree = Path(folder, str(place)), trees[place] and trees[place].resolve()
                own.mkdir(exist_ok=True)
                try:
                    found = start(args.recipe, options, own, bytecode, tree, args.phases)
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                    return 1
                title = f"{'full' if number else 'empty'} caches" + (f", {trees[place]}" if args.trees else "")
                steps = ", ".join(f"{seconds:.1f}" for seconds in found.steps)
                print(f"{title}: seconds from the start to steps 1 to {STEPS}: {steps}", flush=True)
                print(f"    losses {' '.join(found.losses)}", flush=True)
                note(title, {f"s to step {step}": seconds for step, seconds in enumerate(found.steps, 1)})
                taken.setdefault((trees[place], number > 0), []).append(found.steps)
                if args.phases:
                    print_phases(found)
                if args.stacks:
                    list_stacks(found, title, args.stacks)
    for (tree, full), starts in sorted(taken.items(), key=lambda each: each[0][1]) if args.trees else ():
        least = min(steps[0] for steps in starts)
        print(f"least, {'full' if full else 'empty'} caches, {tree}: step 1 after {least:.1f} s, {len(starts)} starts")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""All published figures of one machine, and the tables that show them.

    python benchmarks/all.py --gpus 1 --list                          # parts, their seconds, what they need
    python benchmarks/all.py --gpus 1                                 # all that is not measured yet
    python benchmarks/all.py --gpus 1 --parts nanogpt decode --limit-s 540 --output new.jsonl
    python benchmarks/all.py --gpus 1 --tiny                          # a try of the scripts on a CPU; rows are not kept
    python benchmarks/all.py --tables                                 # write the tables of docs, README and recipes
    python benchmarks/all.py --tables --add new.jsonl                 # take rows of another machine up before

Each row of the output is a line of JSON: part, name, figures by unit, rounds, command, commit, sources, GPU, power
limit, versions, date. `sources` is a hash of the program and of the scripts. What is there for these sources and this
GPU is not measured again: a run that was ended, or stopped by --limit-s, goes on where it was, also at a later commit
that changes only tests or pages. A script that fails has a row "failed" with its last line, and the others go on; one
that needs a program which is not there has a row "skipped". Of two rows with one name the tables show the later.

--peers is a folder with checkouts: nanoGPT, gpt-fast, Megatron-LM, modded-nanogpt, and gpt2-bpe with GPT-2's vocab.json
and merges.txt. They are not part of dtgpt; benchmarks/README.md says where they come from.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from figures import PUBLISHED, ROOT, VARIABLE, Row, add_rows, read_rows
from parts import Part, Script, parts_of

CHECKOUTS = {
    "@nanoGPT": "nanoGPT",
    "@gpt-fast": "gpt-fast",
    "@Megatron-LM": "Megatron-LM",
    "@gpt2-bpe": "gpt2-bpe",
    "@track3": "modded-nanogpt/records/track_3_optimization/train_gpt_simple.py",
}
MEASURED = ("dtgpt/**/*", "recipes/*.py", "benchmarks/*.py")
BYTECODE = Path(tempfile.gettempdir(), "dtgpt-benchmarks-bytecode")
LEAST = 15.0  # seconds that must be left for a script to be started
LATE = 3.0  # times its estimate, and a minute: then a script is ended
TAIL = 1500  # characters of a script's output that are printed


def asked(command: Sequence[str]) -> str:
    """Return what a command prints; nothing where it cannot be run."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def hash_sources() -> str:
    """Return a hash of the package, the recipes and the scripts of this folder, without the docstrings of modules:
    recipes have figures there."""
    digest = hashlib.sha256()
    for pattern in MEASURED:
        for file in sorted(each for each in ROOT.glob(pattern) if "__pycache__" not in each.parts and each.is_file()):
            data = file.read_bytes()
            code = data.split(b'"""', 2)[2] if data.startswith(b'"""') else data
            digest.update(f"{file.relative_to(ROOT)}\0".encode() + code + b"\0")
    return digest.hexdigest()[:8]


def machine(args: argparse.Namespace) -> Row:
    """Return what all rows of this run have in common."""
    import torch

    commit = args.commit or asked(["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+"])
    commit = commit or "unknown"
    found: Row = {"commit": commit, "sources": hash_sources(), "gpus": args.gpus, "python": sys.version.split()[0]}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "cpus": os.cpu_count()}
    found["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    for package in ("triton", "transformers"):
        if importlib.util.find_spec(package):
            found[package] = importlib.metadata.version(package)
    if args.tiny:
        return found | {"gpu": "none", "tiny": True}
    if torch.cuda.device_count() < args.gpus:
        raise SystemExit(f"this machine has {torch.cuda.device_count()} GPUs, not {args.gpus}")
    told = asked(["nvidia-smi", "--query-gpu=name,power.limit,driver_version", "--format=csv,noheader,nounits"])
    name, power, driver = told.splitlines()[0].split(", ")  # torch would keep memory of the GPU to tell its name
    return found | {"gpu": name, "driver": driver} | ({"power limit W": float(power)} if power[:1].isdigit() else {})


class Runner:
    """Runs scripts one after the other, and adds their rows to a file."""

    def __init__(self, args: argparse.Namespace, common: Row, folder: Path):
        self.args, self.common, self.folder = args, common, folder
        self.end = time.monotonic() + args.limit_s
        self.done = {
            (row["part"], row["script"])
            for row in read_rows(args.output)
            if row.get("done") and all(row.get(key) == common[key] for key in ("sources", "gpu", "gpus"))
        }

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def add(self, part: Part, script: Script, command: str, rows: list[Row]) -> None:
        head, tail = {"part": part.name, "script": script.label}, {"command": command, **self.common}
        add_rows(self.args.output, [{**head, **row, **tail} for row in rows])

    def why_not(self, script: Script) -> str:
        """Return why a script cannot run here; nothing where it can."""
        words = script.tiny if self.args.tiny else script.words
        if not words:
            return "it needs a GPU"
        for name in script.needs.split():
            if importlib.util.find_spec(name) is None:
                return f"{name} is not installed"
        for place, path in CHECKOUTS.items():
            if place in words and not (self.args.peers / path).exists():
                return f"there is no {self.args.peers / path}"
        return ""

    def run(self, part: Part, script: Script) -> bool:
        """Run a script and add its rows. Return whether it ended well, or could not run here."""
        gpus, words = self.args.gpus, script.tiny if self.args.tiny else script.words
        words = words.format(n=gpus, four_n=4 * gpus)
        shown = f"{script.environment} {self.shown(words)}".strip()
        if reason := self.why_not(script):
            print(f"-- {part.name}, {script.label}: skipped, {reason}", flush=True)
            self.add(part, script, shown, [{"name": script.label, "skipped": reason}])
            return True
        print(f"-- {part.name}, {script.label}, {self.left:.0f} s left: {shown}", flush=True)
        notes, begin = self.folder / f"{len(list(self.folder.iterdir()))}.jsonl", time.monotonic()
        limit = min(self.left, LATE * script.seconds + 60)
        code, tail = self.execute(words, script.environment, notes, limit)
        seconds = time.monotonic() - begin
        extra = {"differs": script.differs} if script.differs else {}
        rows = [{**row, "name": f"{script.label}: {row['name']}", **extra} for row in read_rows(notes)]
        if code:
            said = f"ended after {seconds:.0f} s" if code == -signal.SIGKILL else (tail.splitlines() or [""])[-1]
            rows.append({"name": script.label, "failed": said, "seconds": round(seconds)})
            print(f"-- failed after {seconds:.0f} s: {said}", flush=True)
        else:
            rows.append({"name": script.label, "done": True, "seconds": round(seconds)})
            print(f"-- {seconds:.0f} s, {script.seconds} s were planned", flush=True)
        self.add(part, script, shown, rows)
        return code == 0

    def shown(self, words: str) -> str:
        """Return a script's command as one would type it."""
        if words.startswith("torchrun "):
            words = words.replace("torchrun", f"torchrun --nproc-per-node {self.args.gpus}", 1)
        else:
            words = f"python {words}"
        return words.replace("@text", "TEXT").replace("@track3", "train_gpt_simple.py").replace("@", "")

    def execute(self, words: str, environment: str, notes: Path, limit: float) -> tuple[int, str]:
        """Run a command, at most `limit` seconds. Return its exit code and the end of its output, which is printed."""
        for place, path in CHECKOUTS.items():
            words = words.replace(place, str((self.args.peers / path).resolve()))
        arguments = shlex.split(words.replace("@text", str(self.folder / "text.txt")))
        if arguments[0] == "torchrun":
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.args.gpus)]
            arguments = [*launch, *arguments[1:]]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PYTHONPATH": path, VARIABLE: str(notes), "PYTHONUNBUFFERED": "1"}
        # Where the interpreter keeps no bytecode, each start would compile PyTorch's sources for seconds.
        own |= {"PYTHONPYCACHEPREFIX": str(BYTECODE), "PYTHONDONTWRITEBYTECODE": ""}
        own |= dict(pair.split("=", 1) for pair in environment.split())
        log = notes.with_suffix(".log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, env=os.environ | own, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = -signal.SIGKILL
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        text = log.read_text(errors="replace")
        with self.args.log.open("a") as output:
            output.write(f"$ {shlex.join(arguments)}\n{text}\n")
        print(text[-TAIL:], flush=True)
        return code, text[-TAIL:].strip()


def scripts_of(parts: Sequence[Part]) -> Iterator[tuple[Part, Script]]:
    return ((part, script) for part in parts for script in part.scripts)


def measure(args: argparse.Namespace, parts: list[Part]) -> int:
    """Run what is not measured yet, as long as there is time; return the exit code."""
    failed, left = [], []
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(args, machine(args), Path(folder))
        write_text(Path(folder, "text.txt"))
        for part, script in scripts_of(parts):
            name = f"{part.name}, {script.label}"
            if (part.name, script.label) in runner.done:
                print(f"-- {name}: is there", flush=True)
            elif runner.left < max(LEAST, script.seconds):
                left.append(name)
            elif not runner.run(part, script):
                failed.append(name)
                if script.is_check:
                    print(f"{name} is wrong: nothing is measured", flush=True)
                    break
    if left:
        print(f"no time was left for: {'; '.join(left)}")
    if failed:
        print(f"failed: {'; '.join(failed)}")
    return 1 if failed else 0


def write_text(file: Path) -> None:
    """Write the sources of Python's standard library, a text that is everywhere."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    file.write_text("".join(source.read_text(errors="replace") for source in sources))


def say_parts(parts: list[Part]) -> None:
    for part in parts:
        print(f"{part.name:14}{sum(s.seconds for s in part.scripts):5} s  {part.about}")
        for script in part.scripts:
            needs = [script.needs, *(place[1:] for place in CHECKOUTS if place in script.words)]
            told = "".join(f" (needs {one})" for one in needs if one)
            print(f"    {script.label:24}{script.seconds:5} s  {script.words}{told}")
    print(f"{sum(s.seconds for _, s in scripts_of(parts))} s in all")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=(1, 2, 4, 8), default=1)
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="these parts, or PART/SCRIPT, in this order")
    parser.add_argument("--list", action="store_true", help="show the parts and measure nothing")
    parser.add_argument("--limit-s", type=float, default=1e9, help="start no script that would take longer in all")
    parser.add_argument("--output", type=Path, help="file of the rows; default: figures.jsonl beside this script")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="folder with checkouts of other programs")
    parser.add_argument("--commit", help="of this checkout, where git cannot tell; with + behind it where files differ")
    parser.add_argument("--tiny", action="store_true", help="a try on a CPU; its rows go to --output, or nowhere")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="file for all that scripts print")
    parser.add_argument("--tables", action="store_true", help="write the tables from the rows and measure nothing")
    parser.add_argument(
        "--add", type=Path, nargs="+", default=[], help="with --tables: files of rows to take up before"
    )
    args = parser.parse_args()
    if args.tables:
        from figure_tables import write_all

        return write_all(args.output or PUBLISHED, args.add)
    parts = parts_of(args.gpus)
    if args.parts:
        known = {part.name: part for part in parts}
        known |= {f"{part.name}/{one.label}": part._replace(scripts=[one]) for part, one in scripts_of(parts)}
        if wrong := [name for name in args.parts if name not in known]:
            names = ", ".join(part.name for part in parts)
            parser.error(f"there is no part {wrong[0]}; the parts of {args.gpus} GPUs are {names}")
        parts = [known[name] for name in args.parts]
    if args.list:
        say_parts(parts)
        return 0
    args.output = args.output or (Path(os.devnull) if args.tiny else PUBLISHED)
    return measure(args, parts)


if __name__ == "__main__":
    sys.exit(main())

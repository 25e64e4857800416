"""Short runs on a CPU whose numbers a change of structure must keep, bit for bit: losses, norms, figures of answers,
texts, and the digests of weights and optimizer state.

    python benchmarks/recorded_runs.py --against COMMIT             # both on this machine, and what differs
    python benchmarks/recorded_runs.py --record FILE                # of this checkout, to be compared later
    python benchmarks/recorded_runs.py --compare FILE [--only dp2 lora]
    python benchmarks/recorded_runs.py --go-on COMMIT             # runs of COMMIT, and from step 2 on by this code

Bits hold for one machine and one version of torch. The runs of COMMIT come from a copy of its files. The exit code is 1
where something differs.
"""

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
STEPS = "--steps 4 --device cpu --log.interval 1 --log.eval_interval 2 --checkpoint.interval 2 --model.dropout 0.1"
GPT2 = f"train recipes/gpt2_tiny.py {STEPS} --log.sample_interval 4 --log.sample_tokens 8"
LLAMA = f"train recipes/llama_tiny.py {STEPS} --log.sample_tokens 0"
BASE = "--init_from runs/base-001"
TUNED = f"train recipes/sft_tiny.py {STEPS} --log.sample_tokens 0 {BASE}"
CHATS, PAIRS = "--data.path chats_chat_document", "--data.path pairs_preference_document --dpo.beta 0.1"
TWO = "--nproc 2 --micro_batch_size 8"
# By name: the commands of `python -m dtgpt`, or programs, the last of which makes the run that is recorded.
CASES = {
    "single": [GPT2],
    **{plan: [f"{GPT2} {TWO} --plan {plan}"] for plan in ("dp2", "dp2_zero3", "tp2_sp", "pp2", "cp2")},
    "pp2_zbv": [f"{GPT2} {TWO} --plan pp2_zbv --model.num_layers 4"],
    **{precision: [f"{GPT2} --precision {precision}"] for precision in ("bf16", "fp16", "fp8")},
    "adamw": [f"{GPT2} --optimizer.kind adamw"],
    "outliers": [f"{GPT2} --optimizer.skip_loss_z 1 --optimizer.skip_grad_norm_z 1"],
    "exact": [f"{GPT2} {TWO} --plan dp2 --precision bf16 --reduce exact"],
    "resume": [f"{GPT2} --exit_interval 3", f"{GPT2} --resume auto"],
    "llama": [LLAMA],
    "sft": [f"{TUNED} {CHATS}"],
    "sft_dp2": [f"{TUNED} {CHATS} {TWO} --plan dp2"],
    "lora": [f"{TUNED} {CHATS} --lora.rank 4"],
    "dpo": [f"{TUNED} {PAIRS}"],
    "grpo": ["recipes/grpo_arithmetic.py --steps 5 --log.interval 1 --device cpu"],
}
# In names of what a clock or the machine decides.
LEFT_OUT = ("seconds", "eta", "per_second", "memory", "mfu", "tflops")
OF_STATE = (
    "step", "updates", "consumed_samples", "tokens", "loss_scale", "fp8_exponents", "outliers", "interval_loss",
    "prompts", "data_digest", "keys",
)  # fmt: skip
TEMPLATE = """{% for message in messages %}{{ message.role }}: {% generation %}{{ message.content }}
{% endgeneration %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


class Checkout:
    """Runs the commands of the files in `root`, in a folder of its own."""

    def __init__(self, root: Path, folder: Path):
        self.root, self.folder = root, folder
        (folder / "recipes").symlink_to(root / "recipes")
        shared = {"DTGPT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        self.environment = {**os.environ, **shared, "HF_HUB_OFFLINE": "1"}

    def run(self, command: str, root: Path | None = None) -> None:
        """Run a command. root: of other files than these."""
        environment = {**self.environment, "PYTHONPATH": str(root or self.root)}
        program = command.split() if command.startswith("recipes/") else ["-m", "dtgpt", *command.split()]
        if root and command.startswith("recipes/"):
            program[0] = str(root / program[0])
        done = subprocess.run(
            [sys.executable, *program], cwd=self.folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{' '.join(program)} of {self.root} ended with {done.returncode}\n{done.stdout}{done.stderr}")

    def prepare_tuning(self) -> None:
        """Make the base, the chats and the pairs of the cases that tune."""
        self.run(f"{LLAMA} --name base --model.seq_length 128")
        asked = [(f"What is {i} plus {i}?", f"It is {2 * i}.") for i in range(200)]
        roles = ("user", "assistant")
        rows = {
            "chats": [
                {"messages": [{"role": r, "content": c} for r, c in zip(roles, turn, strict=True)]} for turn in asked
            ],
            "pairs": [{"prompt": q, "chosen": a, "rejected": f"{a[:-1]}, or more."} for q, a in asked],
        }
        (self.folder / "template.jinja").write_text(TEMPLATE)
        for name, option in (("chats", "--chat"), ("pairs", "--preferences")):
            (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
            options = f"{option} --chat-template template.jinja --tokenizer runs/base-001/tokenizer.json"
            self.run(f"prepare {name}.jsonl {options} --output-prefix {name}")

    def record(self, name: str) -> dict[str, Any]:
        before = set(self.runs())
        for command in CASES[name]:
            self.run(command)
        return recorded(self.newest(before))

    def record_continued(self, name: str, root: Path) -> dict[str, Any]:
        """Return the numbers of a case of one command whose run goes on after step 2 by the files in `root`."""
        before, (command,) = set(self.runs()), CASES[name]
        self.run(f"{command} --exit_interval 2")
        run = self.newest(before)
        self.run(f"{command.replace(BASE, '')} --resume {run}", root)  # which has weights already
        return recorded(run)

    def newest(self, before: set[Path]) -> Path:
        """Return the run that ended last; `before`: those that are older."""
        return max(set(self.runs()) - before, key=lambda path: path.stat().st_mtime)

    def runs(self) -> Iterator[Path]:
        return (path for path in (self.folder / "runs").glob("*-[0-9][0-9][0-9]") if path.is_dir())


def recorded(run: Path) -> dict[str, Any]:
    """Return the numbers of a run, by names that say where they are from."""
    found: dict[str, Any] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for key, value in record.items():
            if not any(word in key for word in LEFT_OUT):
                found[f"step {record['step']}: {key}"] = value
    for folder in sorted((run / "checkpoints").glob("step_*")):
        state = json.loads((folder / "state.json").read_text())
        found |= {f"{folder.name}: {key}": state[key] for key in OF_STATE if key in state}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118, it is no dict
                    content = file.get_tensor(name).contiguous().view(-1).numpy().tobytes()
                    found[f"{folder.name}: {path.name}: {name}"] = hashlib.sha256(content).hexdigest()[:16]
    for path in sorted([*run.glob("samples/*.txt"), *run.glob("answers/*.txt")]):
        found[f"{path.parent.name}/{path.name}"] = path.read_text()
    return found


def record_all(root: Path, names: list[str], then: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return the numbers of the cases. then: the files by which runs go on after step 2."""
    with tempfile.TemporaryDirectory() as folder:
        checkout, found = Checkout(root, Path(folder)), {}
        if any(BASE in command for name in names for command in CASES[name]):
            checkout.prepare_tuning()
        for name in names:
            found[name] = checkout.record_continued(name, then) if then else checkout.record(name)
            print(f"{name}: {len(found[name])} numbers", flush=True)
        return found


@contextmanager
def files_of(commit: str) -> Iterator[Path]:
    """Yield a folder with the files of a commit."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def differences(one: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each case that differs, with the first number in which it does."""
    lines = []
    for name in one.keys() & other.keys():
        mine, theirs = json.loads(json.dumps([one[name], other[name]]))
        wrong = [key for key in (mine | theirs) if mine.get(key) != theirs.get(key)]
        if wrong:
            first = wrong[0]
            values = f"{mine.get(first, 'absent')!r} and {theirs.get(first, 'absent')!r}"
            lines.append(f"{name}: {len(wrong)} of {len(mine)} numbers differ, first {first}: {values:.300}")
    return sorted(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument("--record", type=Path, metavar="FILE", help="write the numbers of this checkout")
    ways.add_argument("--compare", type=Path, metavar="FILE", help="compare this checkout with what was written")
    ways.add_argument("--against", metavar="COMMIT", help="compare this checkout with a commit")
    ways.add_argument(
        "--go-on", metavar="COMMIT", help="compare whole runs of a commit with some that go on by this code"
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="these cases")
    options = parser.parse_args()
    if options.go_on:
        names = [name for name in options.only if len(CASES[name]) == 1]
        with files_of(options.go_on) as root:
            expected, found = record_all(root, names), record_all(root, names, then=ROOT)
        for name, numbers in found.items():  # a run that ended at step 2 saved there, whatever its interval
            found[name] = {key: value for key, value in numbers.items() if key in expected[name] or "step_" not in key}
    else:
        if options.compare:
            expected = json.loads(options.compare.read_text())
        elif options.against:
            with files_of(options.against) as root:
                expected = record_all(root, options.only)
        found = record_all(ROOT, options.only)
    if options.record:
        options.record.write_text(json.dumps(found, indent=1) + "\n")
        return
    lines = differences(found, expected)
    print("\n".join(lines) or f"all {len(found)} cases are equal, bit for bit")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()

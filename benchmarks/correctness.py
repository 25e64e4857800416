"""Measure how far each plan is from one process: losses, gradients and weights, for the tables of docs/correctness.md.

    python benchmarks/correctness.py RESULTS.jsonl                        # plans of 2 ranks on 2 GPUs
    python benchmarks/correctness.py RESULTS.jsonl --device cpu --ranks 4 # plans of 4 ranks through gloo
    python benchmarks/correctness.py RESULTS.jsonl --table                # a row for each plan, from the results
    python benchmarks/correctness.py RESULTS.jsonl --summary              # the rows of docs/correctness.md
    python benchmarks/correctness.py RESULTS.jsonl --picture docs/correctness.png

A case is what `dtgpt compare` does for one plan, and has the command that repeats it. Here all cases run in processes
that stay alive, which saves their start. The reference is one process without captured steps and recomputation, in the
same precision. Each result is appended to RESULTS.jsonl at once; cases that stand there are not measured again.
"""

import argparse
import gc
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from correctness_report import PICTURE, draw, summary, table
from torch import Tensor

from dtgpt.compare.fuzz.pool import Pool, PoolJob
from dtgpt.compare.record import Record, read_record, record, save_record
from dtgpt.compare.rounding import comparable
from dtgpt.compare.verdict import difference
from dtgpt.compare.whole_tensors import gather_whole
from dtgpt.config.execution import choose_device
from dtgpt.ops.operation import split_backward
from dtgpt.train.setup import open_trainer
from dtgpt.train.start import load_recipe
from dtgpt.train.trainer import Trainer

RECIPES = {family: Path(f"recipes/{family}_tiny.py") for family in ("gpt2", "llama")}
LARGER = {  # options of the recipes, by kind of device
    "cuda": "--model.num_layers 4 --model.hidden_size 256 --model.seq_length 256 --micro_batch_size 4 "
    "--global_batch_size 16 --model.dropout 0.1 --optimizer.lr 1e-3 --compile off",
    "cpu": "--model.num_layers 4 --model.hidden_size 64 --model.seq_length 64 --micro_batch_size 2 "
    "--global_batch_size 8 --model.dropout 0.1 --optimizer.lr 1e-3 --device cpu",
}
HEADS = {  # LLaMA's sizes that follow from the width
    "cuda": " --model.head_dim 64 --model.ffn_hidden_size 704",
    "cpu": " --model.head_dim 16 --model.ffn_hidden_size 176",
}
PLANS = {
    2: ["dp2", "dp2_zero1", "dp2_zero2", "dp2_zero3", "tp2", "tp2_sp", "pp2", "pp2_gpipe", "pp2_interleaved",
        "pp2_zbv"],
    4: ["dp2_tp2", "dp2_tp2_sp_zero1", "dp2_tp2_sp_zero3", "dp2_pp2", "dp2_pp2_zero2_interleaved", "tp2_pp2",
        "tp2_sp_pp2_gpipe", "tp2_sp_pp2_interleaved", "tp2_sp_pp2_zbv", "dp4_zero3", "pp4"],
}  # fmt: skip
STEPS = {"cuda": {"fp32": 20, "bf16": 200, "fp8": 200}, "cpu": {"fp32": 20, "bf16": 50, "fp8": 50}}
START, EACH = 60.0, 60.0  # seconds that a job may take, and more for each of its cases
PLAIN = "one process, PyTorch's ops"  # in place of kernels, as pp2_zbv runs them
HANG = 30  # seconds after which a rank that waits for another one ends


class Case(NamedTuple):
    """One plan of one model. label: of a case on one process that shows what rounding alone does."""

    family: str
    plan: str
    precision: str
    steps: int
    graph: str = "auto"
    recompute: str = "none"
    label: str = ""
    other: str = ""  # options that the reference does not have

    @property
    def options(self) -> str:
        given = f"--precision {self.precision} --graph {self.graph} --recompute {self.recompute}"
        return f"--plan {self.plan} {given} {self.other}".strip()

    @property
    def reference(self) -> "Case":
        return Case(self.family, "single", self.precision, self.steps)

    @property
    def name(self) -> str:
        return f"{self.family} {self.options} --steps {self.steps} {self.label}".strip()


class Work(NamedTuple):
    """What the ranks are told."""

    cases: Sequence[Case]
    kind: str  # of device
    folder: str  # of the records of references
    results: str


def kinds(kind: str) -> list[tuple[str, str, int]]:
    """Return (family, precision, steps) on a kind of device."""
    return [(family, precision, steps) for precision, steps in STEPS[kind].items() for family in RECIPES]


def alone(kind: str) -> list[Case]:
    """Return the cases on one process, the references first. kind: of device."""
    steps = STEPS[kind]["bf16"]
    cases = [Case(f, "single", p, s) for f, p, s in kinds(kind)] + [Case("gpt2", "single", "fp32", steps)]
    micro = "one process, micro-batches of 1"
    cases += [Case(f, "single", p, s, label=micro, other="--micro_batch_size 1") for f, p, s in kinds(kind)]
    wide = "one process in fp32"
    cases += [Case(f, "single", "bf16", steps, label=wide, other="--precision fp32") for f in RECIPES]
    wider = "one process in bf16"
    cases += [Case(f, "single", "fp8", steps, label=wider, other="--precision bf16") for f in RECIPES]
    cases += [Case(f, "single", p, s, recompute="full", label="one process") for f, p, s in kinds(kind)]
    if kind == "cuda":
        cases += [Case(f, "single", "bf16", steps, label=PLAIN) for f in RECIPES]
        cases += [Case(f, "single", p, s, "off", label="one process") for f, p, s in kinds(kind)]
    return cases


def together(ranks: int, kind: str) -> list[Case]:
    """Return the cases on several ranks, those that matter most first. kind: of device."""

    def under(graph: str, recompute: str, precisions: Sequence[str] = tuple(STEPS[kind])) -> list[Case]:
        chosen = [k for k in kinds(kind) if k[1] in precisions]
        return [Case(f, plan, p, s, graph, recompute) for f, p, s in chosen for plan in PLANS[ranks]]

    curves = [plan for plan in PICTURE if plan in PLANS[ranks]]
    cases = under("auto", "none") + [Case("gpt2", plan, "fp32", STEPS[kind]["bf16"]) for plan in curves]
    cases += under("auto", "full", ["fp32"])
    if kind == "cuda":
        cases += under("off", "none", ["fp32"]) + under("auto", "full", ["bf16"])
        cases += under("off", "none", ["bf16"]) + under("off", "full")
    return cases


def run_cases(work: Work) -> None:
    """Run the cases in turn, in each process of their plan; rank 0 appends the results."""
    for case in work.cases:
        run_case(case, work)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def run_case(case: Case, work: Work) -> None:
    begin, is_reference = time.perf_counter(), case == case.reference
    ops = split_backward() if case.label == PLAIN else nullcontext()
    with ops, open_trainer(load_recipe(RECIPES[case.family], words(case, work.kind))) as trainer:
        initial = weights(trainer) if is_reference else {}
        found = record(trainer, case.steps)
        device, captured = trainer.mesh.device, trainer.settings.graphs
    if found is None:
        return
    file = Path(work.folder) / f"{case.reference.name.replace(' ', '')}.safetensors"
    if is_reference:
        torch.save(initial, file.with_suffix(".pt"))
        save_record(found, file)
    seen = figures(found, read_record(file), torch.load(file.with_suffix(".pt")))
    seen |= {"seconds": time.perf_counter() - begin, "device": device_name(device), "captured": captured}
    append(Path(work.results), case, seen | {"losses": found.losses})


def words(case: Case, kind: str) -> list[str]:
    sizes = LARGER[kind] + (HEADS[kind] if case.family == "llama" else "")
    return f"{sizes} {case.options} --timeout {HANG}".split()


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return the whole weights, without the elements that are not compared."""
    model = trainer.settings.model
    gathered = gather_whole(trainer.shards, attrgetter("local"))
    return {f"weight/{name}": comparable(model, name, whole).clone() for name, whole in gathered if whole is not None}


def figures(found: Record, reference: Record, initial: dict[str, Tensor]) -> dict[str, Any]:
    """Return the largest relative differences, as `dtgpt compare` measures them, and that of all weights relative to
    the distance which they travelled."""
    differences = difference(found, reference)
    seen: dict[str, Any] = {"loss": differences.loss, "same_initial": differences.same_initial}
    for kind in ("first gradient", "last gradient", "weight"):
        value, name = differences.worst(kind)
        seen |= {kind.replace(" ", "_"): value, f"{kind.replace(' ', '_')}_in": name.partition("/")[2]}
    apart, moved, digest = 0.0, 0.0, hashlib.sha256(repr(found.losses).encode())
    for name, before in initial.items():
        ours, theirs = found.tensors[name], reference.tensors[name]
        apart += (ours - theirs).double().square().sum().item()
        moved += (theirs - before).double().square().sum().item()
        digest.update(ours.contiguous().numpy().tobytes())
    return seen | {"travel": math.sqrt(apart / moved), "digest": digest.hexdigest()[:16]}


def device_name(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__.partition('+')[0]}"


def append(results: Path, case: Case, seen: dict[str, Any]) -> None:
    with results.open("a") as file:
        file.write(json.dumps({"name": case.name, **case._asdict(), **seen}) + "\n")


def done(results: Path) -> dict[str, dict[str, Any]]:
    """Return the results by the names of their cases."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {result["name"]: result for result in map(json.loads, lines)}


def run_job(pool: Pool, work: Work, ranks: int, end: float) -> None:
    """Run the cases in one process group. After a failure, that of the case is noted, and the later ones run again."""
    left = list(work.cases)
    while left and time.monotonic() < end:
        timeout = min(START + EACH * len(left), end - time.monotonic())
        (answers,) = pool.run([PoolJob(ranks, run_cases, (work._replace(cases=left),))], timeout)
        seen = done(Path(work.results))
        left = [case for case in left if case.name not in seen]
        known = [answer for answer in answers if answer.kind != "hangs"]
        failures = [answer.refusal or answer.failure for answer in known if answer.refusal or answer.failure]
        if left and (failures or time.monotonic() < end):
            reason = failures[0] if failures else f"no answer within {timeout:.0f} s"
            append(Path(work.results), left[0], {"problem": reason})
            print(f"{left[0].name}: {reason}", flush=True)
            left = left[1:]


def measure(args: argparse.Namespace) -> None:
    kind = choose_device(args.device).type
    ranks = args.ranks or torch.cuda.device_count()
    end, known = time.monotonic() + args.seconds, done(args.results)
    references = {case.name for case in alone(kind) if case == case.reference}  # measured anew, to compare with
    known = {name: result for name, result in known.items() if name not in references}
    args.results.write_text("".join(json.dumps(result) + "\n" for result in known.values()))

    def wanted(case: Case) -> bool:
        return case.name in references or (case.name not in known and all(word in case.name for word in args.only))

    with tempfile.TemporaryDirectory(prefix="dtgpt-correctness-") as folder, Pool(args.device) as pool:
        for cases, world in ((alone(kind), 1), (together(ranks, kind), ranks)):
            work = Work([case for case in cases if wanted(case)], kind, folder, str(args.results))
            run_job(pool, work, world, end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--ranks", type=int, choices=list(PLANS), help="none: one for each GPU")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so many, with what was measured")
    parser.add_argument("--only", nargs="*", default=[], help="measure cases whose options contain all of these words")
    parser.add_argument("--table", action="store_true", help="print the table of the results")
    parser.add_argument("--summary", action="store_true", help="print the largest differences of all plans")
    parser.add_argument("--picture", type=Path, help="draw the picture of the results")
    args = parser.parse_args()
    if args.table or args.summary:
        print((summary if args.summary else table)(list(done(args.results).values())))
    elif args.picture:
        draw(list(done(args.results).values()), args.picture)
    else:
        measure(args)


if __name__ == "__main__":
    main()

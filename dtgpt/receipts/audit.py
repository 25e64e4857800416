"""`dtgpt audit`: whether the receipts of a run are those of its files, and of steps that are computed again."""

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dtgpt.checkpoint.manifest import list_checkpoints, step_of
from dtgpt.compare.compare import fitting_plan
from dtgpt.receipts.check import Problem, Receipts, changed, problems_of
from dtgpt.receipts.differences import NONE, Basis, Difference, basis_of, differences_of
from dtgpt.receipts.recompute import own_class, recipe_of, start_processes
from dtgpt.util.console import counted, listed, say
from dtgpt.util.errors import UserError

# What a run may change where it goes on without other figures: how and where it computes, what it reports and keeps.
FREE = (
    "plan",
    "plans",
    "device",
    "attention",
    "recompute",
    "recompute_blocks",
    "compile",
    "graph",
    "timeout",
    "lost_after",
    "runs",
    "reduce",
    "name",
    "log",
    "checkpoint",
    "micro_batch_size",
)


def audit(
    run: Path, step: int | None, steps: int, plan: str, device: str | None, recipe_file: Path | None
) -> dict[str, Any]:
    """Check a run, and compute `steps` steps from `step` on again; None: none. Print what is found, and return it as
    docs/audit.md describes its JSON: "status" is 0, or 1 where something differs. Raises UserError."""
    receipts, own = Receipts(run), own_class(recipe_file)
    found: dict[str, Any] = {"version": 1, "run": str(run)}
    problems = list(problems_of(receipts, own)) if step is None else []
    if step is None:
        say(report_of_files(receipts, problems))
    else:
        found["steps"] = audit_steps(receipts, step, step + steps - 1, plan, device, recipe_file)
    differs = step is not None and found["steps"]["verdict"] == "differs"
    return {**found, "problems": [each._asdict() for each in problems], "status": int(bool(problems) or differs)}


def report_of_files(receipts: Receipts, problems: list[Problem]) -> str:
    """Return what the files of a run say of each other."""
    steps, kept = sorted(receipts.steps), [step_of(f) for f in list_checkpoints(receipts.run / "checkpoints")]
    lines = [
        f"{receipts.run}: {counted(len(steps), 'receipt')}" + (f", of steps {steps[0]} to {steps[-1]}" if steps else "")
    ]
    for start in receipts.starts:
        machine = start["machine"]
        lines.append(
            f"  after step {start['after']}: {start['plan']} on {machine['device']}, torch {machine['torch']}, "
            f"dtgpt {start['code']}, reduce {start['reduce']}, {start['bytes_a_step'] / 2**20:,.1f} MiB read a step"
        )
    if receipts.torn:
        lines.append("  the last line is half written, as a process leaves it that is killed; it does not count")
    before = [step for step in kept if steps and step in receipts.tables and step < steps[-1]]
    if before:
        numbered, saved = name_steps(before[0] + 1, steps[-1]), f"the checkpoint of step {listed(before)}"
        lines.append(f"  {numbered} can be computed again, from {saved}: dtgpt audit {receipts.run} --step N")
    if problems:
        return "\n".join([*lines, *(f"WRONG: {problem.said}" for problem in problems)])
    checked = f"the chain, {counted(len(kept), 'checkpoint')}, metrics.jsonl and recipe.json say the same"
    return "\n".join([*lines, f"nothing is wrong: {checked}"])


def audit_steps(
    receipts: Receipts, first: int, last: int, plan: str, device: str | None, recipe_file: Path | None
) -> dict[str, Any]:
    """Compute the steps from the checkpoint before `first` up to `last` again, and compare them with their receipts."""
    begin = checkpoint_before(receipts, first)
    for step in (last, *range(begin + 1, last)):
        if step not in receipts.steps:
            newest = max(receipts.steps, default=0)
            raise UserError(f"step {step} has no receipt in {receipts.run}; the newest is of step {newest}")
    check_one_recipe(receipts, begin, last)
    recipe = recipe_of(receipts, last, recipe_file, plan, device)
    own = fitting_plan(plan, [plan], recipe.plans)
    replicas = own.dp or 1
    micro_batches = recipe.global_batch_size // recipe.micro_batch_size
    if micro_batches % replicas:
        raise UserError(
            f"plan {plan} has {replicas} replicas, and a step of {receipts.run} "
            f"{counted(micro_batches, 'micro-batch', 'micro-batches')}, whose size is kept since another one has other "
            f"bits; choose a plan whose replicas divide {micro_batches}"
        )
    recipe.plan_for(own.world)
    say(f"computing steps {begin + 1} to {last} again under {plan}, from the checkpoint of step {begin}")
    with tempfile.TemporaryDirectory(prefix="dtgpt-audit-") as folder:
        file = Path(folder) / "found.json"
        named = "none" if recipe_file is None else str(recipe_file.absolute())
        arguments = [str(receipts.run), str(begin), str(last), str(file), plan, device or "none", named]
        found = start_processes(own.world, arguments)
    starts = [receipts.start_of(step) for step in range(begin + 1, last + 1)]
    basis = basis_of(found["execution"], starts)
    first_one = next(differences_of(receipts, begin, found, basis), None)
    same_bits = next(differences_of(receipts, begin, found, replace(basis, exact=True, limits=NONE)), None) is None
    verdict = "differs" if first_one is not None else "equal" if same_bits else "rounding"
    say(report_of_steps(begin + 1, last, first_one, verdict, basis))
    return {
        "checkpoint": begin,
        "first": first,
        "last": last,
        "plan": plan,
        "exact": basis.exact,
        "why_not_exact": basis.why,
        "notes": basis.notes,
        "verdict": verdict,
        "first_difference": None if first_one is None else asdict(first_one),
    }


def checkpoint_before(receipts: Receipts, step: int) -> int:
    """Return the step of the newest checkpoint before a step. Raises UserError where there is none."""
    kept = [step_of(folder) for folder in list_checkpoints(receipts.run / "checkpoints")]
    before = [each for each in kept if each < step and each in receipts.tables]
    if not before:
        there = ", ".join(map(str, kept)) or "none"
        raise UserError(
            f"step {step} is computed again from a checkpoint before it, and {receipts.run} keeps those of steps "
            f"{there}; choose a later step, or keep more with --checkpoint.keep_last or --checkpoint.keep_every"
        )
    return max(before)


def check_one_recipe(receipts: Receipts, begin: int, last: int) -> None:
    """Raise UserError where the run went on with another recipe between these steps, from a checkpoint that is gone."""
    final = receipts.start_of(last)
    for step in range(begin + 1, last):
        other = receipts.start_of(step)
        for name, before, now in changed(other["recipe"], final["recipe"]):
            if name not in FREE and name.partition(".")[0] not in ("log", "checkpoint", "plans"):
                raise UserError(
                    f"{receipts.run} went on after step {final['after']} with {name}={now} in place of {before}, and "
                    f"no checkpoint from there on is kept before step {last}; choose steps up to {final['after']}"
                )


def name_steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def report_of_steps(first: int, last: int, found: Difference | None, verdict: str, basis: Basis) -> str:
    one, steps = first == last, name_steps(first, last)
    rests = "bits" if basis.exact else f"rounding alone can be told, since {'; '.join(basis.why)}"
    if found is not None:
        judged = {"bits": "the last bits", "rounding": "as little as rounding does", "fault": "more than rounding does"}
        size = "" if found.verdict is None else f" ({found.verdict}: {judged[found.verdict]})"
        return "\n".join([f"DIFFERS: {found.said}{size}", f"compared: {rests}", *basis.notes])
    if verdict == "equal":
        bits = "has the bits of its receipt" if one else "have the bits of their receipts"
        return f"equal: {steps}, computed again, {bits}"
    return f"within rounding: {steps}, computed again, compared so far as {rests}"

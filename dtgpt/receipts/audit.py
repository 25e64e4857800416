"""`dtgpt audit`: whether the receipts of a run are those of its files, and of steps that are computed again.

Where the bits must be equal (the same kind of GPU and the same versions, and the same plan or `--reduce exact`), any
other bit is a difference. Elsewhere two right runs differ by rounding, and the limits of `dtgpt compare` decide:
losses, norms, and the tensors of a checkpoint that is kept of an audited step. Batches and learning rates have no
rounding.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dtgpt.checkpoint.manifest import list_checkpoints, step_of
from dtgpt.compare.compare import fitting_plan
from dtgpt.compare.finding import Verdict
from dtgpt.compare.record import Record
from dtgpt.compare.verdict import Limits, limits_of, relative
from dtgpt.receipts.check import Problem, Receipts, changed, problems_of, tensor, words
from dtgpt.receipts.recompute import own_class, recipe_of, start_processes
from dtgpt.receipts.state import GRADIENT, WEIGHT, decoded
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError

ROUNDINGS = ("none", "order", "sums", "products")  # of `dtgpt.compare.record`, from the least to the most
NONE = Limits(0.0, 0.0, 0.0, 0.0)
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


@dataclass(frozen=True)
class Difference:
    """The first thing in which steps that were computed again differ from their receipts."""

    step: int
    # "checkpoint", "tokens", "answers", "loss", "gradient", "gradient norm", "learning rate", "state" or "weight"
    kind: str
    tensor: str | None
    module: str | None
    difference: float | None  # relative; None: only that it differs is known
    verdict: Verdict | None  # None: as `difference`
    said: str


@dataclass(frozen=True)
class Basis:
    """What a comparison of bits rests on."""

    exact: bool  # whether the bits must be equal
    why: list[str]  # where they need not be
    limits: Limits
    eps: float  # the relative distance of neighbours in the type of the activations
    notes: list[str]  # what may explain a difference


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
    if kept:
        lines.append(
            f"  steps after {', '.join(map(str, kept[:-1] or kept))} can be computed again: dtgpt audit --step N"
        )
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


def basis_of(here: dict[str, Any], starts: list[dict[str, Any]]) -> Basis:
    """Return what the comparison of steps of these starts with steps of here rests on."""
    why = []
    for name, value in here["machine"].items():
        others = {str(start["machine"].get(name)) for start in starts} - {str(value)}
        if others:
            why.append(f"{name} is {value} here, and was {', '.join(sorted(others))}")
    other_machine = bool(why)
    execution = ("plan", "micro_batch_size", "dtype", "reduce")
    same = all(start[name] == here[name] for start in starts for name in execution)
    rounding = max((each["rounding"] for each in (here, *starts)), key=ROUNDINGS.index)
    if not same and rounding != "none":
        plans = ", ".join(sorted({start["plan"] for start in starts}))
        exact = all(start["reduce"] == "exact" for start in starts)
        how = "computes sums in other pieces" if exact else "is without --reduce exact"
        why.append(f"{here['plan']} beside {plans} {how}")
    record = Record(
        dtype=here["dtype"],
        rounding="products" if other_machine else rounding,
        losses=[],
        norms=[],
        rates=[],
        scales=[],
        memory=[],
        planned=None,
        initial="",
        tensors={},
    )
    codes = {start["code"] for start in starts} - {here["code"]}
    notes = (
        [f"the files of dtgpt are others here ({here['code']}) than those of the run ({', '.join(codes)})"]
        if codes
        else []
    )
    return Basis(not why, why, limits_of(record) if why else NONE, record.eps, notes)


def differences_of(receipts: Receipts, begin: int, found: dict[str, Any], basis: Basis) -> Iterator[Difference]:
    """Yield in what the steps differ from their receipts, in the order in which they were computed."""
    for label in differing(receipts.labels_of_table(begin), receipts.tables[begin].value, found["tables"][str(begin)]):
        said = f"{words(label)} in the checkpoint of step {begin} is not that of its receipt"
        yield _difference(begin, "checkpoint", label, None, None, said)
    for line in found["lines"]:
        step, theirs = line["step"], receipts.steps[line["step"]].value
        yield from of_inputs(step, line, theirs)
        labels = receipts.labels(step)
        others = differing(labels, theirs, line["digests"]) if basis.exact else []
        apart: dict[str, float] = next(
            (found["apart"][at] for at in sorted(found["apart"], key=int) if int(at) >= step), {}
        )
        yield from of_figure(step, "loss", line["loss"], theirs["loss"], basis.limits.loss, basis)
        yield from (of_tensor(step, label, apart, basis) for label in others if label.startswith(f"{GRADIENT}/"))
        yield from of_figure(step, "gradient norm", line["norm"], theirs["norm"], basis.limits.tensors, basis)
        yield from of_figure(step, "learning rate", line["lr"], theirs["lr"], 0.0, basis)
        yield from (of_tensor(step, label, apart, basis) for label in others if not label.startswith(f"{GRADIENT}/"))
        if str(step) in found["tables"]:
            yield from of_checkpoint(receipts, step, found, basis)


def differing(labels: list[str], line: dict[str, Any], digests: str) -> list[str]:
    """Return the labels whose digests differ from those of a line; states before the weights that they move."""
    pairs = zip(labels, decoded(line["digests"]), decoded(digests), strict=True)
    return sorted((label for label, a, b in pairs if a != b), key=lambda label: label.startswith(f"{WEIGHT}/"))


def of_inputs(step: int, ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Difference]:
    """Yield the parts of the batch of a step that are not those of its receipt."""
    if ours.get("answers") != theirs.get("answers"):
        said = f"the answers of step {step}, or their rewards, are not those of its receipt"
        yield Difference(step, "answers", None, None, None, "fault", said)
    for name, digest in ours.get("batch", {}).items():
        if digest != theirs.get("batch", {}).get(name):
            said = f"the {name} of the batch of step {step} are not those of its receipt"
            yield Difference(step, "tokens", name, None, None, "fault", said)


def of_figure(step: int, kind: str, ours: Any, theirs: Any, limit: float, basis: Basis) -> Iterator[Difference]:
    """Yield how a figure of a step differs by more than its limit."""
    if ours == theirs:
        return
    if not isinstance(ours, float) or not isinstance(theirs, float):
        said = f"the {kind} of step {step} is {ours}, and its receipt says {theirs}"
        yield Difference(step, kind, None, None, None, "fault", said)
        return
    apart = relative(theirs, ours)
    if apart > limit:
        verdict = verdict_of(apart, basis)
        said = f"the {kind} of step {step} is {ours!r}, and its receipt says {theirs!r}: {apart:.1e} apart"
        yield Difference(step, kind, None, None, apart, verdict, said)


def of_tensor(step: int, label: str, apart: dict[str, float], basis: Basis) -> Difference:
    """Return the difference of a tensor whose digest is not that of the receipt. apart: of the next checkpoint that is
    kept, by how much its tensors differ."""
    known = None if label.startswith(f"{GRADIENT}/") else apart.get(label)
    size = f", by {known:.1e} in the next checkpoint" if known else ""
    said = f"{words(label)} after step {step} has other bits than its receipt{size}"
    return _difference(step, _kind(label), label, known or None, verdict_of(known, basis) if known else None, said)


def of_checkpoint(receipts: Receipts, step: int, found: dict[str, Any], basis: Basis) -> Iterator[Difference]:
    """Yield the tensors of a checkpoint, or of its receipt, that are not those of the step."""
    apart = found["apart"].get(str(step), {})
    for label in differing(receipts.labels_of_table(step), receipts.tables[step].value, found["tables"][str(step)]):
        by = apart.get(label)
        if basis.exact or (by is not None and by > (basis.limits.weights or basis.limits.tensors)):
            size = f", by {by:.1e}" if by else ""
            said = f"{words(label)} in the checkpoint of step {step}, or its receipt, is not that of the step{size}"
            yield _difference(step, _kind(label), label, by or None, verdict_of(by, basis) if by else None, said)


def verdict_of(apart: float, basis: Basis) -> Verdict:
    """Return whether a relative difference is of the last bits, one of rounding by the limits of `dtgpt compare`, or a
    fault. Where bits must be equal, rounding is what sums in another order would do."""
    limit = max(basis.limits.tensors, 1e-4 if basis.eps < 1e-6 else 2 * basis.eps)
    return "bits" if apart <= basis.eps else "rounding" if apart <= limit else "fault"


def _kind(label: str) -> str:
    kind = label.partition("/")[0]
    return kind if kind in (GRADIENT, WEIGHT) else "state"


def _difference(step: int, kind: str, label: str, by: float | None, verdict: Verdict | None, said: str) -> Difference:
    return Difference(step, kind, tensor(label), label.partition("/")[2].rpartition(".")[0], by, verdict, said)


def report_of_steps(first: int, last: int, found: Difference | None, verdict: str, basis: Basis) -> str:
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    rests = "bits" if basis.exact else f"rounding alone can be told, since {'; '.join(basis.why)}"
    if found is not None:
        judged = {"bits": "the last bits", "rounding": "as little as rounding does", "fault": "more than rounding does"}
        size = "" if found.verdict is None else f" ({found.verdict}: {judged[found.verdict]})"
        return "\n".join([f"DIFFERS: {found.said}{size}", f"compared: {rests}", *basis.notes])
    if verdict == "equal":
        return f"equal: {steps} again have the bits of their receipts"
    return f"within rounding: {steps} again, compared so far as {rests}"

"""`dtgpt compare`: run the same steps under several plans and hold each against one process.

What is compared: the initial weights; loss, gradient norm, learning rate and loss scale of every step; the gradients of
the first and of the last step; the final weights. `dtgpt.compare.verdict` has the rules. The last step of every run
begins with the weights and the optimizer's state of the reference: gradients of late steps part in a chaotic run, and
show nothing. The first step is traced, and `dtgpt.compare.gate` finds the first tensor that differs.
"""

import io
import math
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import dtgpt
from dtgpt.compare.finding import Finding, Located
from dtgpt.compare.fuzz.pool import Pool
from dtgpt.compare.gate import Reference, locate, problem_of_reference, problem_of_tokens
from dtgpt.compare.record import Record, Tracing, read_record, record_run
from dtgpt.compare.verdict import Difference, Limits, difference, first_state, limits_between, problems
from dtgpt.compare.workers import run_in_pool, run_workers
from dtgpt.config.plan import Plan
from dtgpt.config.plan_choice import SINGLE, parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.posttrain.grpo.config import GrpoConfig
from dtgpt.train.start import checked
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError
from dtgpt.util.rules import Given, Is, Other, Rule, Rules, check_rules
from dtgpt.util.shared.words import hanging, terminal_width

REFERENCE = SINGLE
MOVED = ("moved", "moved 2", "moved 3")  # one process that rounds otherwise, in as many ways as it takes


@dataclass(frozen=True)
class Side:
    """One of the runs that are compared: its name, plan, options, and the code that it runs; None: this one."""

    name: str
    plan_name: str
    plan: Plan
    options: list[str]
    code: Path | None = None


COMPARED: Rules = (  # of a recipe, of which so many steps are `asked`, with so many answers to a prompt
    Rule(
        "--steps {asked} is more than the recipe's {num_steps}; use {num_steps} or fewer",
        Is("asked", ">", Other("num_steps")),
    ),
    Rule("dtgpt compare begins with initial weights; leave --resume out", Given("resume")),
    Rule(
        "grpo.group={group}, but dtgpt compare holds steps on data against each other, and a drawn token that differs "
        "by rounding changes all after it; use --grpo.group 0",
        Given("group"),
    ),
)


def compare(
    recipe: Recipe,
    path: Path,
    names: list[str],
    steps: int,
    tolerance: float | None,
    options: list[str],
    against: Mapping[str, list[str]] = MappingProxyType({}),
    commits: Sequence[str] = (),
) -> dict[str, Any]:
    """Run the reference and each plan and print how they differ, and the first tensor in which each does; on GPUs the
    processes stay from run to run, unless `tolerance` is 0. Return the result as docs/compare.md describes its JSON:
    "status" is 0, or 1 where a plan is further from the reference than `tolerance` (None: by precision), or has a
    fault. against: options of runs of one process that are compared, too, by name. commits: of the code of the
    reference, and of all other runs; one: this code."""
    checked(recipe)
    check_rules(COMPARED, recipe, asked=steps, group=recipe.section(GrpoConfig).group)
    plans = {name: fitting_plan(name, names, recipe.plans) for name in [REFERENCE, *names]}
    for name, plan in plans.items():
        try:
            replace(recipe, plan=name).plan_for(plan.world)
        except UserError as error:
            raise UserError(f"plan {name}: {error}") from None
    keep = tolerance != 0  # who asks for equal bits has each run as `dtgpt train` would start it
    with tempfile.TemporaryDirectory(prefix="dtgpt-compare-") as temporary, Pool(recipe.device, keep=keep) as pool:
        folder = Path(temporary)
        codes = [code_of(commit, folder / f"code-{place}") for place, commit in enumerate(commits)]
        theirs, ours = (codes[0], codes[-1] if len(codes) > 1 else None) if codes else (None, None)
        sides = [Side(REFERENCE, REFERENCE, plans[REFERENCE], options, theirs)]
        if codes:
            name = commits[1] if len(commits) > 1 else "this code"
            sides.append(Side(name, REFERENCE, plans[REFERENCE], options, ours))
        sides += [Side(name, name, plan, options, ours) for name, plan in plans.items() if name != REFERENCE]
        sides += [Side(name, REFERENCE, plans[REFERENCE], more, ours) for name, more in against.items()]

        pool.expect([side.plan.world for side in sides if side.code is None])
        records: dict[str, Record] = {}
        differences: dict[str, Difference] = {}
        located: dict[str, Located] = {}
        unfit: tuple[Finding, str] | None = None
        for place, side in enumerate(sides):
            name = side.name
            say(f"{name}: {counted(side.plan.world, 'process', 'processes')}, {counted(steps, 'step')}")
            file = folder / f"record-{place}"
            tracing = Tracing(file, folder / "shared", is_reference=place == 0)
            records[name] = run_plan(pool, path, side, steps, tracing, recipe.timeout)
            if name in against:  # its options may choose other kernels
                records[name] = replace(records[name], rounding="products")
            if all(map(math.isinf, records[name].norms)):
                raise UserError(
                    f"plan {name} skipped all steps, since fp16 overflows at this loss scale: nothing can be compared; "
                    "use a smaller scale such as --loss_scale.initial 4096"
                )
            differences[name] = difference(records[name], records[REFERENCE])
            if place == 0:
                reference = Reference(file, records[name])
                unfit = problem_of_reference(reference, tolerance)
                if unfit is not None:
                    break
                continue
            limits = limits_between(records[name], records[REFERENCE])
            located[name] = locate(reference, records[name], file, limits.first_gradient)
            records[name].tensors.clear()  # gigabytes
            for written in folder.glob(f"{file.name}*"):
                written.unlink()
        wrong = verdicts(records, differences, tolerance)
        if unfit is not None:
            wrong[REFERENCE] = [unfit[1]]
        others = {n: problem_of_tokens(records[n], records[REFERENCE], found) for n, found in located.items()}
        for number, name in enumerate(MOVED, 1):
            unsettled = any(said for each, said in wrong.items() if not others.get(each))
            if tolerance is not None or unfit is not None or not unsettled:
                break
            say(f"{name}: one process whose initial weights are moved by their last bit, as rounding alone would")
            tracing = Tracing(folder / name.replace(" ", "-"), folder / "shared", is_reference=False, moved=number)
            moved = run_plan(pool, path, sides[0], steps, tracing, recipe.timeout)
            differences[name] = difference(moved, records[REFERENCE])
            records[name] = replace(moved, tensors={})
            wrong = verdicts(records, differences, tolerance)
    rounded = [found for name, found in differences.items() if name in MOVED]
    for name, found in located.items():
        if others[name]:
            wrong[name] = [others[name]]
        elif tolerance is None:
            limits = limits_between(records[name], records[REFERENCE])
            found.add(first_state(differences[name], limits, rounded if records[name].rounding != "none" else ()))
            wrong[name][:0] = [] if found.fault is None else [str(found.fault)]
    say(report(records, differences, wrong, located))
    return as_json(records, differences, wrong, located, unfit and unfit[0])


def code_of(commit: str, folder: Path) -> Path:
    """Return `folder`, with the files of a commit of the git checkout in which this code lies. Raises UserError."""
    root = Path(dtgpt.__file__).resolve().parents[1]

    def git(*words: str) -> subprocess.CompletedProcess[bytes]:
        try:
            return subprocess.run(["git", "-C", str(root), *words], capture_output=True)
        except FileNotFoundError:
            raise UserError("--commits needs git; install it, or compare plans or --against options") from None

    if git("rev-parse", "--git-dir").returncode:
        raise UserError(f"--commits {commit}: {root} is not a git checkout; run dtgpt from a clone of its repository")
    if git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}").returncode:
        raise UserError(f"--commits {commit}: the git checkout at {root} has no such commit; see git log --oneline")
    archive = git("archive", "--format=tar", commit)
    if archive.returncode:
        raise UserError(f"--commits {commit}: {archive.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    if not any((folder / "dtgpt" / room / "trace.py").is_file() for room in ("compare", "train")):  # now, and before
        raise UserError(f"--commits {commit}: its dtgpt compare cannot trace a step yet; use a later commit")
    return folder


def as_json(
    records: Mapping[str, Record],
    differences: Mapping[str, Difference],
    wrong: Mapping[str, list[str]],
    located: Mapping[str, Located],
    unfit: Finding | None = None,
) -> dict[str, Any]:
    """Return the result as docs/compare.md describes its JSON. unfit: where the reference has a fault of its own."""
    runs = {}
    for name, found in located.items():
        apart = differences[name]
        runs[name] = {
            "verdict": "fault" if wrong[name] else "rounding" if found.first is not None else "same",
            "problems": wrong[name],
            "first_difference": None if found.first is None else found.first.as_json(),
            "first_fault": None if found.fault is None else found.fault.as_json(),
            "losses": records[name].losses,
            "choices": {
                "compared": records[name].chosen,
                "others": records[name].turned,
                "per_million": records[name].flips_per_million,
            },
            "differences": {
                "loss": apart.loss,
                "first_gradient": apart.first_gradient,
                "last_gradient": apart.last_gradient,
                "weight": apart.weight,
                "validation_loss": apart.held_out,
            },
        }
    reference = {
        "name": REFERENCE,
        "losses": records[REFERENCE].losses,
        "verdict": "same" if unfit is None else "fault",
        "problems": wrong[REFERENCE],
        "first_fault": None if unfit is None else unfit.as_json(),
    }
    return {"version": 1, "status": int(any(wrong.values())), "reference": reference, "runs": runs}


def verdicts(
    records: Mapping[str, Record], differences: Mapping[str, Difference], tolerance: float | None
) -> dict[str, list[str]]:
    """Return what is wrong with each plan, beyond what rounding alone did to one process, where that was measured. With
    a tolerance, the figures of the report decide, and not the optimizer's state."""
    own = None if tolerance is None else Limits(tolerance, tolerance, tolerance, tolerance)
    rounded = [found for name, found in differences.items() if name in MOVED]
    return {
        name: problems(
            found if own is None else replace(found, apart=[]),
            own or limits_between(records[name], records[REFERENCE]),
            rounded if records[name].rounding != "none" else (),
        )
        for name, found in differences.items()
        if name not in MOVED
    }


def fitting_plan(name: str, names: list[str], own: Mapping[str, Plan]) -> Plan:
    """Return the plan of a name with dp filled in; `own`: the plans of the recipe. A name without a data parallel
    degree has one replica where tensor or pipeline parallelism say how many processes there are; `dp` and `zero3` fill
    as many processes as the largest other plan, 2 at least."""
    plan = parse_plan(name, own)
    if plan.dp is not None or plan.world > 1:
        return plan.for_world(plan.world)
    others = [parse_plan(other, own) for other in names]
    return plan.for_world(max([2, *(p.world for p in others)]))


def run_plan(pool: Pool, path: Path, side: Side, steps: int, tracing: Tracing, patience: float) -> Record:
    """Run a side and read what it recorded: in processes of the pool, or where it has other code than this one in
    processes of its own. patience: seconds that its processes wait for each other."""
    role = "reference" if tracing.is_reference else "plan"
    words = [str(path), str(tracing.file), str(steps), str(tracing.moved), str(tracing.shared), role, *side.options]
    words += ["--plan", side.plan_name]
    if side.code is None:
        failed = run_in_pool(pool, side.plan.world, record_run, (words,), patience)
    else:
        beside = str(path.parent)  # modules of the recipe, which code of older commits does not look for there
        more = {"PYTHONPATH": os.pathsep.join([str(side.code), beside]), "PYTHONSAFEPATH": "1"}
        failed = run_workers(side.plan.world, ["record", *words], more)
    if failed is not None:
        raise UserError(f"plan {side.name}: {failed or 'failed; see its output above'}")
    return read_record(tracing.file)


def report(
    records: dict[str, Record],
    differences: dict[str, Difference],
    wrong: Mapping[str, list[str]],
    located: Mapping[str, Located] = MappingProxyType({}),
) -> str:
    """Return the losses by step, then the largest differences, the memory of the fullest rank, and what is `wrong`."""
    names, width = list(records), max(10, *(len(name) + 2 for name in records))
    side_by_side = max(1, ((terminal_width() or 80) - 6) // width)
    lines = []
    for first in range(0, len(names), side_by_side):
        some = names[first : first + side_by_side]
        lines += ["", "loss".ljust(6) + "".join(name.rjust(width) for name in some)]
        for step, losses in enumerate(zip(*(records[name].losses for name in some), strict=True), start=1):
            lines.append(f"{step:<6}" + "".join(f"{loss:{width}.6f}" for loss in losses))
    last = len(records[REFERENCE].losses)
    lines += ["", f"largest relative differences, of gradients in steps 1 and {last}; memory in GiB"]
    lines += [f"{'':<{width}}{'loss':>9}{'grad 1':>9}{f'grad {last}':>10}{'weight':>9}{'GiB':>8}{'planned':>9}"]
    for name, d in differences.items():
        figures = f"{d.loss:9.1e}{d.first_gradient:9.1e}{d.last_gradient:10.1e}{d.weight:9.1e}"
        planned = f"{records[name].planned:9.2f}" if records[name].planned else f"{'-':>9}"
        lines.append(f"{name:<{width}}{figures}{max(records[name].memory):8.2f}{planned}")
        if wrong.get(name):
            lines.append(hanging(f"  WRONG: {'; '.join(wrong[name])}", 4))
        elif name in located:
            finding = located[name].first
            lines.append(hanging(f"  first difference: {'none' if finding is None else finding}", 4))
        if told := records[name].told_choices:
            lines.append(hanging(f"  {told}", 4))
    if MOVED[0] in differences:
        lines.append(f"{MOVED[0]}: one process whose initial weights were moved by their last bit")
    return "\n".join(lines)

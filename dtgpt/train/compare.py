"""`dtgpt compare`: run the same steps under several plans and hold each against one process.

What is compared: the initial weights; loss, gradient norm, learning rate and loss scale of every step; the gradients of
the first and of the last step; the final weights. `dtgpt.train.verdict` has the rules.
"""

import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dtgpt.config.plan import Plan
from dtgpt.config.plan_names import SINGLE, parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.train.job import checked
from dtgpt.train.record import Record, read_record
from dtgpt.train.verdict import Difference, Limits, difference, limits_of, problems
from dtgpt.util.console import counted, hanging, say, say_error
from dtgpt.util.environment import child_environment
from dtgpt.util.errors import UserError
from dtgpt.util.process import VARIABLES

REFERENCE = SINGLE
MOVED = ("moved", "moved 2", "moved 3")  # one process that rounds otherwise, in as many ways as it takes


def compare(
    recipe: Recipe, path: Path, names: list[str], steps: int, tolerance: float | None, options: list[str]
) -> int:
    """Run the reference and each plan in processes of their own and print how they differ. Returns 0, or 1 where a plan
    is further from the reference than `tolerance` (None: by precision)."""
    checked(recipe)
    most = recipe.num_steps
    if steps > most:
        raise UserError(f"--steps {steps} is more than the recipe's {most}; use {most} or fewer")
    if recipe.resume:
        raise UserError("dtgpt compare begins with initial weights; leave --resume out")
    plans = {name: fitting_plan(name, names, recipe.plans) for name in [REFERENCE, *names]}
    for name, plan in plans.items():
        try:
            replace(recipe, plan=name).plan_for(plan.world)
        except UserError as error:
            raise UserError(f"plan {name}: {error}") from None
    with tempfile.TemporaryDirectory(prefix="dtgpt-compare-") as folder:

        def run(name: str, plan: Plan, moved: int = 0) -> Record:
            file = Path(folder) / "record.safetensors"
            found = run_plan(path, name, plan.world, steps, options, file, moved)
            file.unlink()  # its tensors stay readable; the next run must not write into the same file
            return found

        records: dict[str, Record] = {}
        differences: dict[str, Difference] = {}
        for name, plan in plans.items():
            say(f"{name}: {counted(plan.world, 'process', 'processes')}, {counted(steps, 'step')}")
            records[name] = run(name, plan)
            if all(map(math.isinf, records[name].norms)):
                raise UserError(
                    f"plan {name} skipped all steps, since fp16 overflows at this loss scale: nothing can be compared; "
                    "use a smaller scale such as --loss_scale.initial 4096"
                )
            differences[name] = difference(records[name], records[REFERENCE])
            if name != REFERENCE:
                records[name].tensors.clear()  # gigabytes
        wrong = verdicts(records, differences, tolerance)
        for number, name in enumerate(MOVED, 1):
            if tolerance is not None or not any(wrong.values()):
                break
            say(f"{name}: one process whose initial weights are moved by their last bit, as rounding alone would")
            moved = run(REFERENCE, plans[REFERENCE], number)
            differences[name] = difference(moved, records[REFERENCE])
            records[name] = replace(moved, tensors={})
            wrong = verdicts(records, differences, tolerance)
    say(report(records, differences, wrong))
    return 1 if any(wrong.values()) else 0


def verdicts(
    records: Mapping[str, Record], differences: Mapping[str, Difference], tolerance: float | None
) -> dict[str, list[str]]:
    """Return what is wrong with each plan, beyond what rounding alone did to one process, where that was measured."""
    own = None if tolerance is None else Limits(tolerance, tolerance, tolerance, tolerance)
    rounded = [found for name, found in differences.items() if name in MOVED]
    return {
        name: problems(found, own or limits_of(records[name]), rounded if records[name].rounding != "none" else ())
        for name, found in differences.items()
        if name not in MOVED
    }


def fitting_plan(name: str, names: list[str], own: Mapping[str, Plan]) -> Plan:
    """Return the plan of a name with dp filled in; `own`: the plans of the recipe. A name without a data parallel
    degree has one replica where tensor or pipeline parallelism say how many processes there are; `dp` and `zero3` fill
    as many processes as the largest other plan, 2 at least."""
    plan = parse_plan(name, own)
    if plan.dp is not None or plan.tp * plan.pp > 1:
        return plan.for_world((plan.dp or 1) * plan.tp * plan.pp)
    others = [parse_plan(other, own) for other in names]
    return plan.for_world(max([2, *(p.world for p in others)]))


def run_plan(path: Path, name: str, world: int, steps: int, options: list[str], file: Path, moved: int = 0) -> Record:
    """Start the processes of a plan through torchrun, wait for them, and read what they recorded. moved: from initial
    weights that `move_weights` has moved by this seed; 0: as they are."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    worker = ["-m", "dtgpt", "record", str(path), str(file), str(steps), str(moved), *options]
    worker += ["--plan", name]
    environment = {k: v for k, v in child_environment().items() if k not in VARIABLES.values()}
    environment.setdefault("OMP_NUM_THREADS", "1")
    done = subprocess.run(
        [sys.executable, *launcher, *worker], env=environment, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        output = done.stdout + done.stderr
        sentence = next((line for line in output.splitlines() if line.startswith("dtgpt: ")), None)
        if sentence is None:
            say_error(output[-5000:])
        raise UserError(
            f"plan {name}: {sentence.removeprefix('dtgpt: ') if sentence else 'failed; see its output above'}"
        )
    return read_record(file)


def report(records: dict[str, Record], differences: dict[str, Difference], wrong: Mapping[str, list[str]]) -> str:
    """Return the losses by step, then the largest differences, the memory of the fullest rank, and what is `wrong`."""
    names, width = list(records), max(10, *(len(name) + 2 for name in records))
    side_by_side = max(1, (shutil.get_terminal_size().columns - 6) // width)
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
    if MOVED[0] in differences:
        lines.append(f"{MOVED[0]}: one process whose initial weights were moved by their last bit")
    return "\n".join(lines)

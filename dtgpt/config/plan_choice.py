"""Plans by name, and by the number of processes that are there.

Each part of a name says one thing, and "_" joins them: `dp4` (data parallel degree; left out, it fills the processes
that were started), `cp2` (context parallel), `tp2` (tensor parallel), `sp` (sequence parallel), `pp2` (pipeline
parallel), `zero3` (ZeRO level), and the pipeline's schedule: `gpipe`, `1f1b`, `interleaved` or `interleaved4` (stages
per rank), `zbv`. `single` is one process. A recipe may define more plans under names of its own.

`tp8_zero1 | tp4_zero1 | tp2` names alternatives, of which the first that fits the processes is used. Without them, the
number of processes must be one that the plan fits. With them, the run uses as many processes as any alternative fits,
and the ranks that are left over wait for the end of the run."""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dtgpt.config.plan import SCHEDULES, Plan, ResolvedPlan, divisors
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, shown

SINGLE = "single"
PARTS = {  # a part of a name -> the field that it sets
    r"dp([0-9]*)": "dp", r"cp([0-9]+)": "cp", r"tp([0-9]+)": "tp", r"pp([0-9]+)": "pp", r"zero([0-3])": "zero",
    r"sp": "sequence_parallel", r"gpipe|1f1b|zbv": "schedule", r"interleaved([0-9]*)": "stages_per_rank",
}  # fmt: skip
DIGITS = 9  # a number of more is cut, and refused as too large


def parse_plan(name: str, own: Mapping[str, Plan] | None = None) -> Plan:
    """Return the plan of a name: one of the recipe's `own`, or parts joined by "_". Raises UserError for a part that
    means nothing, with the nearest one."""
    own = own or {}
    check_own_plans(own)
    if name in own:
        return own[name]
    if name == SINGLE:
        return Plan(dp=1)
    if "|" in name:
        raise UserError(
            f"plan={shown(name)} names alternatives, of which dtgpt train chooses one; give one of them here"
        )
    said = f"plan={shown(name)}"
    values: dict[str, Any] = {}
    for part in name.split("_"):
        given = _read_part(part)
        if given is None:
            raise UserError(f"{said}: {_what_is_wrong(part, own)}")
        for key, value in given.items():
            if key in values:
                raise UserError(f"{said} says {shown(part)} and something else of the same kind; say one of them")
            values[key] = value
    try:
        return Plan(**values)
    except UserError as error:
        raise UserError(f"{said}: {error}") from None


def check_own_plans(own: Mapping[str, Plan]) -> None:
    """Raise UserError where a recipe's plans are not plans, or take names that mean something else."""
    if not isinstance(own, Mapping):
        raise UserError(f"plans={shown(own)} is not a dict; give one such as plans={{'wide': Plan(tp=4)}}")
    for name, plan in own.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_ -]{1,60}", name):
            raise UserError(f"plans has the name {shown(name)}; use up to 60 letters, digits, '_', '-' and spaces")
        if name == SINGLE or all(_read_part(part) is not None for part in name.split("_")):
            raise UserError(f"plans defines {shown(name)}, which is a standard plan; give it another name")
        if not isinstance(plan, Plan):
            raise UserError(f"plans[{shown(name)}] is {shown(plan)}; give a Plan, such as Plan(tp=2)")


def _what_is_wrong(part: str, own: Mapping[str, Plan]) -> str:
    if not part:
        return "a part is empty; write single, or parts such as tp2_pp2"
    if part == SINGLE or part in own:
        return f"{shown(part)} is a whole plan; use it alone"
    known = ["dp2", "cp2", "tp2", "pp2", "sp", "zero1", "zero2", "zero3", *SCHEDULES]
    if re.search(r"[^A-Za-z0-9]", part) and not own:
        return f"{shown(part)} is not part of a plan; join parts by '_', as in tp2_pp2"
    near = difflib.get_close_matches(part.lower(), [*known, SINGLE, *own], n=1, cutoff=0.6)
    listed = ", ".join([*own, SINGLE, *known])
    return f"{shown(part)} is not part of a plan; " + (
        f"did you mean {near[0]}?" if near else f"use {listed}, joined by '_'"
    )


def _read_part(part: str) -> dict[str, Any] | None:
    for pattern, key in PARTS.items():
        match = re.fullmatch(pattern, part)
        if not match:
            continue
        number = int(match[1][:DIGITS]) if match.groups() and match[1] else None
        if key == "stages_per_rank":
            return {"schedule": SCHEDULES["interleaved"]} | ({key: number} if number is not None else {})
        if key == "schedule":
            return {key: SCHEDULES[part]}
        return {key: True} if key == "sequence_parallel" else {key: number}
    return None


OR = "|"  # between alternatives
AUTO = "auto"  # chosen by `dtgpt.planning.auto`: alone, or as the last alternative
MOST = 100  # alternatives
Check = Callable[[ResolvedPlan], None]  # raises UserError where model or batch do not fit a plan


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """Which plan a number of processes runs, and why."""

    plan: ResolvedPlan
    named: Plan  # the alternative, with dp and ZeRO as its name says
    name: str  # of the alternative, as written
    world: int  # processes that are there
    fits: Mapping[str, int]  # every alternative: the largest number of these processes that it fits, or 0
    refused: Mapping[str, str]  # alternatives that do not fit as many as make whole replicas: the reason

    @property
    def waiting(self) -> int:
        """Processes that are left over: those of the highest ranks."""
        return self.world - self.plan.world

    def describe(self) -> list[str]:
        """Return what the log says of the choice; nothing for a plan without alternatives."""
        if len(self.fits) == 1:
            return []
        place = f"{_ordinal(list(self.fits).index(self.name) + 1)} of {len(self.fits)}"
        lines = [f"plan: {self.name} ({place}) on {_processes(self.plan.world)}: {self.plan.name}"]
        if self.waiting:
            waits = "waits" if self.waiting == 1 else "wait"
            most = f"no alternative fits more than {self.plan.world:,} of them"
            lines.append(f"{self.waiting:,} of {_processes(self.world)} {waits}: {most}")
        return lines

    def explain(self) -> list[str]:
        """Return why each of the other alternatives was not chosen."""
        lines = []
        for name, count in self.fits.items():
            if count == self.plan.world and name != self.name:
                lines.append(f"{name} fits {count:,} of {_processes(self.world)}, too, but comes after {self.name}")
            elif name != self.name:
                reason = f": {self.refused[name]}" if name in self.refused else ""
                lines.append(f"{name} fits {f'{count:,}' if count else 'none'} of {_processes(self.world)}{reason}")
        return lines


def parse_alternatives(text: str, own: Mapping[str, Plan] | None = None) -> dict[str, Plan]:
    """Return the plans that `text` names, in its order, by their names: one, or several joined by "|". `own`: the
    recipe's plans. An `auto` at the end stays out. Raises UserError for a name that is missing, means nothing, or is
    given twice."""
    if text == AUTO:
        raise UserError("plan=auto is chosen by dtgpt train and dtgpt plan, for a number of processes; give a plan")
    if not isinstance(text, str) or OR not in text:
        return {text: parse_plan(text, own)}
    names = [name.strip() for name in text.split(OR)]
    if names[-1] == AUTO and len(names) > 1:
        names.pop()
    if len(names) > MOST:
        raise UserError(f"plan={shown(text)} has {len(names)} alternatives; give {MOST} or fewer")
    found: dict[str, Plan] = {}
    for name in names:
        if name == AUTO:
            raise UserError(
                f"plan={shown(text)} has an alternative after auto, which never comes to it; write auto last"
            )
        if not name:
            raise UserError(f"plan={shown(text)} has no plan on one side of a '|'; write it as in 'tp4 | tp2'")
        plan = parse_plan(name, own)
        same = next((other for other, known in found.items() if known == plan), None)
        if same is not None:
            raise UserError(
                f"plan={shown(text)} gives the same plan twice ({' and '.join(dict.fromkeys((same, name)))}); "
                "leave one of them out"
            )
        found[name] = plan
    return found


def choose_plan(
    alternatives: Mapping[str, Plan],
    world: int,
    micro_batches: int,
    check: Check,
    started: bool = True,
    all_of_them: bool = False,
) -> PlanChoice:
    """Return the choice for `world` processes: of the alternatives that fit the largest number of them, the first.
    There is one where it must fit `all_of_them`.

    micro_batches: the global batch size / the micro-batch size, which dp divides. started: as in `Plan.for_world`.
    Raises UserError, one sentence, where nothing fits.
    """
    if all_of_them:
        ((name, named),) = alternatives.items()
        plan = resolve(named, world, check, started)
        return PlanChoice(plan=plan, named=named, name=name, world=world, fits={name: world}, refused={})
    fits = {name: largest_fit(plan, world, micro_batches, check) for name, plan in alternatives.items()}
    refused = {name: _refusal(plan, world, check, started) for name, plan in alternatives.items()}
    most = max(fits.values())
    if not most:
        name, reason = next(iter(refused.items()))
        names = f" {OR} ".join(alternatives)
        raise UserError(f"no alternative of the plan '{names}' fits {_processes(world)} or fewer; {name}: {reason}")
    name = next(name for name, count in fits.items() if count == most)
    return PlanChoice(
        plan=resolve(alternatives[name], most, check),
        named=alternatives[name],
        name=name,
        world=world,
        fits=fits,
        refused={name: reason for name, reason in refused.items() if reason},
    )


def resolve(plan: Plan, world: int, check: Check, started: bool = True) -> ResolvedPlan:
    """Return the plan for `world` processes, checked; raises UserError."""
    resolved = plan.for_world(world, started).without_idle_zero()
    check(resolved)
    return resolved


def largest_fit(plan: Plan, world: int, micro_batches: int, check: Check) -> int:
    """Return the largest number of processes, `world` at most, that the plan fits; 0 where there is none."""
    for count in _counts(plan, world, micro_batches):
        try:
            resolve(plan, count, check)
        except UserError:
            continue
        return count
    return 0


def _counts(plan: Plan, world: int, micro_batches: int) -> Iterator[int]:
    """Yield the numbers of processes up to `world` that make whole replicas which divide the batch, largest first."""
    one = plan.cp * plan.tp * plan.pp
    degrees = [plan.dp] if plan.dp is not None else reversed(divisors(micro_batches))
    yield from (dp * one for dp in degrees if dp * one <= world)


def _refusal(plan: Plan, world: int, check: Check, started: bool) -> str:
    """Return why the plan does not fit as many of the processes as make whole replicas, or ""."""
    one = plan.cp * plan.tp * plan.pp
    nearest = plan.world if plan.dp is not None else world // one * one
    try:
        resolve(plan, nearest if 0 < nearest <= world else world, check, started)
    except UserError as error:
        return str(error)
    return ""


def _processes(count: int) -> str:
    return counted(count, "process", "processes")


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"

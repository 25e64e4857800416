"""Plans by name, and what a run makes of one.

A plan is a word because people type it, compare it, and find it in records and checkpoints. With an option for each
degree, a run would have many options in place of a name.

Each part of a name says one thing, and "_" joins them: `dp4` (data parallel degree; left out, it fills the processes
that were started), `cp2` (context parallel), `ep2` (expert parallel), `tp2` (tensor parallel), `sp` (sequence
parallel), `pp2` (pipeline parallel), `zero3` (ZeRO level), and the pipeline's schedule: `gpipe`, `1f1b`, `interleaved`
or `interleaved4` (stages per rank), `zbv`. `single` is one process. A recipe may define more plans under its own names.

The number of processes must be one that the plan fits. A name with alternatives, `tp8 | tp4`, or `auto`, leaves a
choice to a capability (`dtgpt.planning`), so that a run goes on with the processes that are there.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dtgpt.config.plan import SCHEDULES, Plan, ResolvedPlan
from dtgpt.util import seams
from dtgpt.util.errors import UserError, shown

SINGLE = "single"
PARTS = {  # a part of a name -> the field that it sets
    r"dp([0-9]*)": "dp",
    r"cp([0-9]+)": "cp",
    r"ep([0-9]+)": "ep",
    r"tp([0-9]+)": "tp",
    r"pp([0-9]+)": "pp",
    r"zero([0-3])": "zero",
    r"sp": "sequence_parallel",
    r"gpipe|1f1b|zbv": "schedule",
    r"interleaved([0-9]*)": "stages_per_rank",
}
DIGITS = 9  # a number of more is cut, and refused as too large


def parse_plan(name: str, own: Mapping[str, Plan] | None = None) -> Plan:
    """Return the plan of a name: one of the recipe's `own`, or parts joined by "_". Raises UserError for a part that
    means nothing, with the nearest one."""
    own = own or {}
    for check in seams.listed("own_plans") if own else ():
        check(own)
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
        given = read_part(part)
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


def _what_is_wrong(part: str, own: Mapping[str, Plan]) -> str:
    if not part:
        return "a part is empty; write single, or parts such as tp2_pp2"
    if part == SINGLE or part in own:
        return f"{shown(part)} is a whole plan; use it alone"
    known = ["dp2", "cp2", "ep2", "tp2", "pp2", "sp", "zero1", "zero2", "zero3", *SCHEDULES]
    if re.search(r"[^A-Za-z0-9]", part) and not own:
        return f"{shown(part)} is not part of a plan; join parts by '_', as in tp2_pp2"
    near = difflib.get_close_matches(part.lower(), [*known, SINGLE, *own], n=1, cutoff=0.6)
    listed = ", ".join([*own, SINGLE, *known])
    return f"{shown(part)} is not part of a plan; " + (
        f"did you mean {near[0]}?" if near else f"use {listed}, joined by '_'"
    )


def read_part(part: str) -> dict[str, Any] | None:
    """Return the fields that a part of a name sets; None where it means nothing."""
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
Check = Callable[[ResolvedPlan], None]  # raises UserError where model or batch do not fit a plan


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """Which plan a number of processes runs, and why. Without alternatives there is nothing to say of it."""

    plan: ResolvedPlan
    named: Plan  # with dp and ZeRO as its name says
    name: str  # as written
    world: int  # processes that are there
    fits: Mapping[str, int] = field(default_factory=dict)  # alternatives: the largest number that each fits, or 0

    def describe(self) -> list[str]:
        """Return what the log says of the choice."""
        return []

    def explain(self) -> list[str]:
        """Return why each of the other alternatives was not chosen."""
        return []


def parse_alternatives(text: str, own: Mapping[str, Plan] | None = None) -> dict[str, Plan]:
    """Return the plans that `text` names, in its order, by their names: one, or alternatives, which a capability finds.
    `own`: the recipe's plans. Raises UserError for a name that is missing, means nothing, or is given twice."""
    if text == AUTO:
        raise UserError("plan=auto is chosen by dtgpt train and dtgpt plan, for a number of processes; give a plan")
    parse = seams.added("alternatives").get("parse")
    if parse is None or not isinstance(text, str) or OR not in text:
        return {text: parse_plan(text, own)}
    return seams.load(parse)(text, own)


def resolve(plan: Plan, world: int, check: Check, started: bool = True) -> ResolvedPlan:
    """Return the plan for `world` processes, checked; raises UserError."""
    resolved = plan.for_world(world, started).without_idle_zero()
    check(resolved)
    return resolved

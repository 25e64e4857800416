"""Plans by the number of processes: `tp8_zero1 | tp4_zero1 | tp2` names alternatives, of which the first that fits the
processes that are there is used.

Without alternatives, the number of processes must be one that the plan fits. With them, the run uses as many processes
as any alternative fits, and the ranks that are left over wait for the end of the run.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dtgpt.config.plan import Plan, ResolvedPlan, divisors
from dtgpt.config.plan_names import parse_plan
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, shown

OR = "|"  # between alternatives
MOST = 100  # alternatives
Check = Callable[[ResolvedPlan], None]  # raises UserError where model or batch do not fit a plan


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """Which plan a number of processes runs, and why."""

    plan: ResolvedPlan
    named: Plan  # the alternative, with dp and ZeRO as its name says
    name: str  # of the alternative, as written
    names: tuple[str, ...]  # of all alternatives
    world: int  # processes that are there
    refused: Mapping[str, str]  # alternatives before this one: why they do not fit `plan.world` processes

    @property
    def waiting(self) -> int:
        """Processes that are left over: those of the highest ranks."""
        return self.world - self.plan.world

    def describe(self) -> list[str]:
        """Return what the log says of the choice; nothing for a plan without alternatives."""
        if len(self.names) == 1:
            return []
        place, processes = _ordinal(self.names.index(self.name) + 1), counted(self.plan.world, "process", "processes")
        lines = [f"plan: {self.name} ({place} of {len(self.names)}) on {processes}: {self.plan.name}"]
        if self.waiting:
            waits = "waits" if self.waiting == 1 else "wait"
            there = counted(self.world, "process", "processes")
            lines.append(
                f"{self.waiting:,} of {there} {waits}: no alternative fits more than {self.plan.world:,} of them"
            )
        return lines

    def explain(self) -> list[str]:
        """Return why each of the other alternatives was not chosen."""
        rest = self.names[self.names.index(self.name) + 1 :]
        return [f"{name}: {reason}" for name, reason in self.refused.items()] + [
            f"{name}: not needed, since {self.name} before it fits" for name in rest
        ]


def parse_alternatives(text: str, own: Mapping[str, Plan] | None = None) -> dict[str, Plan]:
    """Return the plans that `text` names, in its order, by their names: one, or several joined by "|". `own`: the
    recipe's plans. Raises UserError for a name that is missing, means nothing, or is given twice."""
    if not isinstance(text, str) or OR not in text:
        return {text: parse_plan(text, own)}
    names = [name.strip() for name in text.split(OR)]
    if len(names) > MOST:
        raise UserError(f"plan={shown(text)} has {len(names)} alternatives; give {MOST} or fewer")
    found: dict[str, Plan] = {}
    for name in names:
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
    alternatives: Mapping[str, Plan], world: int, share: int, check: Check, started: bool = True
) -> PlanChoice:
    """Return the choice for `world` processes: of the alternatives that fit the largest number of them, the first. A
    plan without alternatives must fit all.

    share: the global batch size / the micro-batch size, which dp divides. started: as in `Plan.for_world`.
    Raises UserError, one sentence, where nothing fits.
    """
    names = tuple(alternatives)
    if len(names) == 1:
        named = alternatives[names[0]]
        plan = resolve(named, world, check, started)
        return PlanChoice(plan=plan, named=named, name=names[0], names=names, world=world, refused={})
    fits = {name: largest_fit(plan, world, share, check) for name, plan in alternatives.items()}
    most = max(fits.values())
    if not most:
        first = names[0]
        reason = _refusal(alternatives[first], nearest_world(alternatives[first], world), check, started)
        there = counted(world, "process", "processes")
        raise UserError(
            f"no alternative of the plan '{f' {OR} '.join(names)}' fits {there} or fewer; {first}: {reason}"
        )
    chosen = next(name for name in names if fits[name] == most)
    before = names[: names.index(chosen)]
    return PlanChoice(
        plan=resolve(alternatives[chosen], most, check),
        named=alternatives[chosen],
        name=chosen,
        names=names,
        world=world,
        refused={name: _refusal(alternatives[name], most, check, started) for name in before},
    )


def resolve(plan: Plan, world: int, check: Check, started: bool = True) -> ResolvedPlan:
    """Return the plan for `world` processes, checked; raises UserError."""
    resolved = plan.for_world(world, started).without_idle_zero()
    check(resolved)
    return resolved


def largest_fit(plan: Plan, world: int, share: int, check: Check) -> int:
    """Return the largest number of processes, `world` at most, that the plan fits; 0 where there is none."""
    for count in _counts(plan, world, share):
        try:
            resolve(plan, count, check)
        except UserError:
            continue
        return count
    return 0


def nearest_world(plan: Plan, world: int) -> int:
    """Return the largest number of processes up to `world` that makes whole replicas of the plan; `world` where there
    is none."""
    one = plan.tp * plan.pp
    nearest = plan.world if plan.dp is not None else world // one * one
    return nearest if 0 < nearest <= world else world


def _counts(plan: Plan, world: int, share: int) -> Iterator[int]:
    """Yield the numbers of processes up to `world` that make whole replicas which divide the batch, largest first."""
    one = plan.tp * plan.pp
    degrees = [plan.dp] if plan.dp is not None else reversed(divisors(share))
    yield from (dp * one for dp in degrees if dp * one <= world)


def _refusal(plan: Plan, world: int, check: Check, started: bool) -> str:
    try:
        resolve(plan, world, check, started)
    except UserError as error:
        return str(error)
    raise AssertionError("a plan that fits was not chosen")


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"

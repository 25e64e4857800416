"""Alternatives of a plan: `tp8_zero1 | tp4_zero1 | tp2`, of which the first that fits the processes is used.

The run uses as many processes as any alternative fits, and the ranks that are left over wait for its end. So a run that
goes on needs no other plan where a host is missing. All ranks find the same choice, each by itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dtgpt.config.plan import Plan, divisors
from dtgpt.config.plan_choice import AUTO, OR, Check, PlanChoice, parse_plan, resolve
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, shown

MOST = 100  # alternatives


@dataclass(frozen=True, kw_only=True)
class ChosenAlternative(PlanChoice):
    """The alternative that a number of processes runs, and why it is this one."""

    refused: Mapping[str, str]  # alternatives that do not fit as many as make whole replicas: the reason

    @property
    def waiting(self) -> int:
        """Processes that are left over: those of the highest ranks."""
        return self.world - self.plan.world

    def describe(self) -> list[str]:
        """Return what the log says of the choice; nothing where `auto` alone is the other alternative."""
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
    """Return the plans that `text` names, joined by "|", in its order, by their names. An `auto` at the end stays out.
    Raises UserError for a name that is missing, means nothing, or is given twice."""
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


def choose_alternative(
    alternatives: Mapping[str, Plan], world: int, micro_batches: int, check: Check, started: bool
) -> ChosenAlternative:
    """Return the choice for `world` processes: of the alternatives that fit the largest number of them, the first.
    micro_batches: the global batch size / the micro-batch size, which dp divides. started: False where the processes do
    not exist. Raises UserError, one sentence, where nothing fits."""
    fits = {name: largest_fit(plan, world, micro_batches, check) for name, plan in alternatives.items()}
    refused = {name: _refusal(plan, world, check, started) for name, plan in alternatives.items()}
    most = max(fits.values())
    if not most:
        name, reason = next(iter(refused.items()))
        names = f" {OR} ".join(alternatives)
        raise UserError(f"no alternative of the plan '{names}' fits {_processes(world)} or fewer; {name}: {reason}")
    name = next(name for name, count in fits.items() if count == most)
    return ChosenAlternative(
        plan=resolve(alternatives[name], most, check),
        named=alternatives[name],
        name=name,
        world=world,
        fits=fits,
        refused={name: reason for name, reason in refused.items() if reason},
    )


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

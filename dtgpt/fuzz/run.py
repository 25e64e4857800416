"""Random cases one after the other: draw, run, judge, shrink what fails, report."""

import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dtgpt.config.execution import choose_device
from dtgpt.config.plan import SCHEDULES
from dtgpt.fuzz.case import Case, Setting, parse
from dtgpt.fuzz.drawing import draw_case
from dtgpt.fuzz.judge import Figures, Outcome, judge
from dtgpt.fuzz.measure import Seen, measure
from dtgpt.fuzz.pool import Answer, Job, Pool
from dtgpt.fuzz.shrink import shrink
from dtgpt.util.console import counted, hanging, say
from dtgpt.util.errors import UserError

RANKS_ON_CPU = 4
TRIES = 60  # cases to run while one is shrunk
TRIES_OF_A_HANG = 4  # each of which takes the whole timeout
TIMEOUT = 120.0  # seconds for a case

Work = Callable[..., Any]


class Runner:
    """Runs cases on a pool of processes. work: what every rank of a plan does, `measure` or a function like it."""

    def __init__(
        self, setting: Setting, pool: Pool, work: Work = measure, timeout: float = TIMEOUT,
        tolerance: float | None = None,
    ):  # fmt: skip
        self.setting, self.pool, self.work, self.timeout, self.tolerance = setting, pool, work, timeout, tolerance

    def run(self, case: Case) -> Outcome:
        """Run a case under its plan and on one process, side by side, and return the verdict."""
        try:
            world = self.setting.check(case).world
        except UserError as error:
            return Outcome(case, "refused", str(error))
        except Exception as error:
            return Outcome(case, "fails", f"the check of the plan raised {error!r}", kind=type(error).__name__)
        jobs = [
            Job(1, references, (self.setting, case)),
            Job(world, self.work, (self.setting, case, "plan")),
        ]
        reference, ranks = self.pool.run(jobs, self.timeout)
        for answers, where in ((ranks, ""), (reference, "on one process: ")):
            if answers is None:
                return Outcome(case, "hangs", f"{where}no answer within {self.timeout:g} s", kind="hangs")
            failures = sorted((a for a in answers if a.failure), key=lambda answer: answer.when)
            if failures:
                return Outcome(case, "fails", f"{where}{failures[0].failure}", kind=failures[0].kind)
        if refusal := next((a.refusal for a in _said(ranks) if a.refusal), None):
            return Outcome(case, "refused", refusal)
        if refusal := next((a.refusal for a in _said(reference) if a.refusal), None):
            return Outcome(case, "fails", f"one process refuses what the plan runs: {refusal}", kind="refused")
        (alone, exact), seen = _said(reference)[0].value, [a.value for a in _said(ranks)]
        outcome = judge(case, seen, alone, exact, self.tolerance)
        if outcome.verdict == "right" or exact is not None or self.tolerance is not None:
            return outcome
        (answers,) = self.pool.run([Job(1, measure, (self.setting, case, "moved"))], self.timeout)
        return judge(case, seen, alone, answers[0].value) if answers and answers[0].value else outcome

    def shrink(self, outcome: Outcome, tries: int = TRIES) -> Outcome:
        """Return the outcome of the smallest case found that fails in the same way."""
        smallest = outcome

        def fails(case: Case) -> bool:
            nonlocal smallest
            found = self.run(case)
            if found.is_bad and found.kind == outcome.kind:
                smallest = found
                return True
            return False

        shrink(outcome.case, fails, tries if outcome.verdict != "hangs" else TRIES_OF_A_HANG)
        return smallest


def references(setting: Setting, case: Case) -> tuple[Seen | None, Seen | None]:
    """Return what one process does, and in fp32 if the case is in 16 bits."""
    return measure(setting, case, "reference"), measure(setting, case, "exact")


def _said(answers: list[Answer] | None) -> list[Answer]:
    return answers or []


def most_ranks(device: str) -> int:
    """Return the largest number of processes of a case: the GPUs of this machine, 4 on a CPU."""
    return torch.cuda.device_count() if choose_device(device).type == "cuda" else RANKS_ON_CPU


def cases(seed: int, first: int, count: int, ranks: int, plans: Sequence[str]) -> Iterator[tuple[int, Case]]:
    for index in range(first, first + count):
        yield index, draw_case(seed, index, ranks, plans)


def run_random(
    setting: Setting, path: Path, count: int, which: str | None = None, plans: Sequence[str] = (),
    minutes: float | None = None, tolerance: float | None = None,
) -> int:  # fmt: skip
    """Run `count` random cases, or those from the one that `which` names, a number or the text of a case. Returns 0, or
    1 where one fails. path: of the recipe, for commands that repeat a case."""
    seed, ranks = setting.base.seed, most_ranks(setting.base.device)
    numbered = which is None or which.isdecimal()
    drawn = cases(seed, int(which or 0), count, ranks, plans) if numbered else enumerate([parse(which or "")])
    timeout = setting.base.timeout if "timeout" in setting.given else TIMEOUT
    say(f"{counted(count, 'random case') if numbered else 'one case'}, seed {seed}, up to {counted(ranks, 'rank')}")
    outcomes: list[Outcome] = []
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    with Pool(setting.base.device) as pool:
        runner = Runner(setting, pool, timeout=timeout, tolerance=tolerance)
        for index, case in ((index, setting.pin(case)) for index, case in drawn):
            if time.monotonic() >= end:
                say(f"stopped after {counted(len(outcomes), 'case')}: --minutes {minutes:g} are over")
                break
            outcome = runner.run(case)
            outcomes.append(outcome)
            say(hanging(line(index, outcome), 4))
            if outcome.is_bad:
                smallest = runner.shrink(outcome) if numbered else outcome
                say(hanging(f"  smallest: {smallest.sentence}", 4))
                say(f"  repeat: dtgpt compare {shlex.quote(str(path))} --case {shlex.quote(str(smallest.case))}")
    say(table(outcomes))
    return 1 if any(outcome.is_bad for outcome in outcomes) else 0


def line(index: int, outcome: Outcome) -> str:
    """Return the progress line of a case."""
    case, figures = outcome.case, outcome.figures
    own = [word for word, there in (("cut", case.blocks_per_stage), ("table", case.table)) if there]
    name = " ".join([case.architecture, case.plan, *own, case.values.get("precision", "")])
    said = outcome.sentence
    if outcome.verdict == "right" and figures is not None:
        said = f"loss {figures.loss:.0e}, gradient {figures.gradient:.0e}, weight {figures.weight:.0e}"
    return f"{index:>4} {outcome.verdict:<8}{name}: {said}"


def kinds(case: Case) -> list[str]:
    """Return the kinds of plan and training that a case belongs to."""
    plan = case.parallel_plan()
    found = [case.architecture, str(case.values.get("precision", "fp32"))]
    if plan.world == 1:
        found.append("one process")
    if (plan.dp or 1) > 1:
        found.append(f"dp zero{plan.zero}")
    if plan.tp > 1:
        found.append("tp sp" if plan.sequence_parallel else "tp")
    if plan.pp > 1:
        found.append(f"pp {next(word for word, name in SCHEDULES.items() if name == plan.schedule)}")
    found += ["own cut"] * bool(case.blocks_per_stage) + ["own table"] * bool(case.table)
    return found


def table(outcomes: Sequence[Outcome]) -> str:
    """Return counts and largest differences by kind. A case belongs to several kinds; those in 16 bits have rows of
    their own, since their rounding hides that of the others."""
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    bad = sum(outcome.is_bad for outcome in outcomes)
    lines = ["", f"{'largest relative differences':<30}{'cases':>6}{'refused':>8}{'wrong':>6}"
             f"{'loss':>9}{'gradient':>10}{'weight':>9}{'held-out':>10}"]  # fmt: skip
    rows: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        narrow = outcome.case.values.get("precision", "fp32") != "fp32"
        try:
            names = kinds(outcome.case)
        except UserError:
            names = ["other"]
        for name in names[1:2] if narrow else names:
            rows.setdefault(name, []).append(outcome)
    for name, some in sorted(rows.items()):
        largest = [max(values) for values in zip(*(o.figures for o in some if o.figures), strict=True)] or [
            math.nan
        ] * 4
        refused, wrong = sum(o.verdict == "refused" for o in some), sum(o.is_bad for o in some)
        figures = Figures(*largest)
        lines.append(
            f"{name:<30}{len(some):>6}{refused:>8}{wrong:>6}"
            f"{figures.loss:>9.0e}{figures.gradient:>10.0e}{figures.weight:>9.0e}{figures.held_out:>10.0e}"
        )
    lines += ["", f"{counted(verdicts['right'], 'case')} right, {verdicts['refused']} refused, {bad} wrong"]
    return "\n".join(lines)

"""Random cases one after the other: draw, run, judge, shrink what fails, report."""

import math
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dtgpt.compare.choices import file_of_choices
from dtgpt.compare.fuzz.case import MODELS, Case, Setting, parse
from dtgpt.compare.fuzz.drawing import draw_case
from dtgpt.compare.fuzz.judge import Alone, Outcome, judge
from dtgpt.compare.fuzz.measure import Seen, measure
from dtgpt.compare.fuzz.pool import Pool, PoolJob, ProcessResult
from dtgpt.compare.fuzz.report import line, table
from dtgpt.compare.fuzz.shrink import shrink
from dtgpt.config.execution import choose_device
from dtgpt.config.overrides import Options
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError
from dtgpt.util.shared.option_words import as_words
from dtgpt.util.shared.words import hanging

RANKS_ON_CPU = 4
TRIES = 60  # cases to run while one is shrunk
TRIES_OF_A_HANG = 4  # each of which takes the whole timeout
SHRINKING = 60.0  # seconds that the search for a smaller case may take where --minutes are over
TIMEOUT = 120.0  # seconds for a case

Work = Callable[..., Any]


class Runner:
    """Runs cases on a pool of processes. work: what every rank of a plan does, `measure` or a function like it."""

    def __init__(
        self,
        setting: Setting,
        pool: Pool,
        work: Work = measure,
        timeout: float = TIMEOUT,
        tolerance: float | None = None,
    ):
        self.setting, self.pool, self.work, self.timeout, self.tolerance = setting, pool, work, timeout, tolerance

    def run(self, case: Case) -> Outcome:
        """Run a case under its plan and on one process, and return the verdict: side by side, unless the plan takes the
        choices of experts of the other."""
        try:
            world, before = self.setting.check(case).world, case.first_plan()
        except UserError as error:
            return Outcome(case, "refused", str(error))
        except Exception as error:
            return Outcome(case, "fails", f"the check of the plan raised {error!r}", kind=type(error).__name__)
        alone = PoolJob(1, references, (self.setting, case))
        plan = PoolJob(world, self.work, (self.setting, case, "plan"))
        chosen: list[ProcessResult] = []
        if isinstance(MODELS[case.architecture], ExpertsConfig):
            file_of_choices(self.setting.shared).unlink(missing_ok=True)
            (chosen,) = self.pool.run([alone], self.timeout)
            if any(answer.failure for answer in chosen) and (problem := self._problem(case, [], chosen)):
                return problem
        if before is None:
            ranks, reference = self._beside(plan, alone, chosen)
            return self._problem(case, ranks, reference) or self._judge(case, ranks, reference)
        shutil.rmtree(self.setting.run_folder, ignore_errors=True)
        self.setting.run_folder.mkdir()
        begin = PoolJob(before.world, self.work, (self.setting, case, "first"))
        first, reference = self._beside(begin, alone, chosen)
        if problem := self._problem(case, first, reference):
            return problem
        (ranks,) = self.pool.run([plan], self.timeout)
        return self._problem(case, ranks, reference) or self._judge(case, ranks, reference, first)

    def _beside(
        self, plan: PoolJob, alone: PoolJob, known: list[ProcessResult]
    ) -> tuple[list[ProcessResult], list[ProcessResult]]:
        """Return the answers of a plan, and those of one process, which runs beside it where they are not `known`."""
        ranks, *more = self.pool.run([plan] if known else [plan, alone], self.timeout)
        return ranks, known or more[0]

    def _problem(self, case: Case, ranks: list[ProcessResult], reference: list[ProcessResult]) -> Outcome | None:
        """Return the outcome of a case whose plan, or whose reference on one process, did not come to its end."""
        for answers, where in ((ranks, ""), (reference, "on one process: ")):
            if first := min((a for a in answers if a.failure), key=lambda answer: answer.when, default=None):
                return Outcome(
                    case, "hangs" if first.kind == "hangs" else "fails", f"{where}{first.failure}", kind=first.kind
                )
        if refusal := next((a.refusal for a in ranks if a.refusal), None):
            return Outcome(case, "refused", refusal)
        if refusal := next((a.refusal for a in reference if a.refusal), None):
            return Outcome(case, "fails", f"one process refuses what the plan runs: {refusal}", kind="refused")
        return None

    def _judge(
        self,
        case: Case,
        ranks: list[ProcessResult],
        reference: list[ProcessResult],
        first: Sequence[ProcessResult] = (),
    ) -> Outcome:
        """Judge what ran to its end; where it is wrong, with regard to what rounding does to the case."""
        alone, seen, before = reference[0].value, _values(ranks), _values(first)
        outcome = judge(case, seen, alone, self.tolerance, before)
        if not outcome.is_bad or self.tolerance is not None or alone.moved is not None:
            return outcome
        (answers,) = self.pool.run([PoolJob(1, measure, (self.setting, case, "moved"))], self.timeout)
        return judge(case, seen, alone._replace(moved=next(iter(_values(answers)), None)), first=before)

    def shrink(self, outcome: Outcome, tries: int = TRIES, until: float = math.inf) -> Outcome:
        """Return the outcome of the smallest case found that fails in the same way. None is tried after `until` on the
        monotonic clock."""
        smallest = outcome

        def fails(case: Case) -> bool:
            nonlocal smallest
            if time.monotonic() >= until:
                return False
            found = self.run(case)
            if found.is_bad and found.kind == outcome.kind:
                smallest = found
                return True
            return False

        shrink(outcome.case, fails, tries if outcome.verdict != "hangs" else TRIES_OF_A_HANG)
        return smallest


def references(setting: Setting, case: Case) -> Alone:
    """Return what one process does. For a case in 16 bits, add what it does in fp32, and what rounding does to it."""
    reference, exact = measure(setting, case, "reference"), measure(setting, case, "exact")
    if reference is None:
        raise ValueError("every case has a reference")
    return Alone(reference, exact, None if exact is None else measure(setting, case, "moved"))


def _values(answers: Sequence[ProcessResult]) -> list[Seen]:
    return [answer.value for answer in answers if not answer.failure]


def most_ranks(device: str) -> int:
    """Return the largest number of processes of a case: the GPUs of this machine, 4 on a CPU."""
    return torch.cuda.device_count() if choose_device(device).type == "cuda" else RANKS_ON_CPU


def cases(seed: int, first: int, count: int, ranks: int, plans: Sequence[str]) -> Iterator[tuple[int, Case]]:
    for index in range(first, first + count):
        yield index, draw_case(seed, index, ranks, plans)


def run_random(
    setting: Setting,
    path: Path,
    count: int,
    which: str | None = None,
    plans: Sequence[str] = (),
    minutes: float | None = None,
    tolerance: float | None = None,
) -> int:
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
                say_repeat(outcome, path, setting.given)  # before the search for a smaller one, which takes minutes
            if outcome.is_bad and numbered:
                smallest = runner.shrink(outcome, until=max(end, time.monotonic() + SHRINKING))
                if smallest is not outcome:
                    say(hanging(f"  smallest: {smallest.sentence}", 4))
                    say_repeat(smallest, path, setting.given)
    say(table(outcomes))
    return 1 if any(outcome.is_bad for outcome in outcomes) else 0


def say_repeat(outcome: Outcome, path: Path, given: Options) -> None:
    """Print the command that repeats a case of the recipe at `path` with the options `given`."""
    words = [str(path), "--case", str(outcome.case), *as_words(given)]
    say(f"  repeat: dtgpt compare {shlex.join(words)}")

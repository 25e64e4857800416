"""Budgets of tests: a slow one has a mark that says how many seconds it takes, and what is wrong with marks is told."""

import os
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable

LIMIT = 1.0  # seconds that a test may take without a mark, all its cases together
QUICKER = 4.0  # times quicker than its mark says: the mark is wrong
REFERENCE = 0.085  # seconds of `loop` on the machine on which marks were measured: two cores, two tests at a time


def budget_of(item) -> tuple[str, float]:
    """Return what shares a budget, a test with all its cases or a file, and the seconds of its mark or LIMIT."""
    name = item.nodeid.partition("[")[0]
    for node in reversed(item.listchain()):
        for mark in node.own_markers:
            if mark.name == "slow":
                return name if node is item else node.nodeid, float(mark.args[0])
    return name, LIMIT


def asks_for_all(config) -> bool:
    """Return whether pytest was asked for all tests, not for some by name."""
    return config.args_source is config.ArgsSource.TESTPATHS and not config.option.keyword


def loop(clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of some work in Python, longer on a slow machine and, but for CPU time, on a busy one. It has
    no calls: a recorded run would follow them."""
    begin, total = clock(), 0
    for i in range(1_500_000):
        total += i * i
    return clock() - begin


def slowness(workers: int) -> float:
    """Return how many times longer than where marks were measured tests take on this machine."""
    crowd = workers / (os.cpu_count() or 1)
    return max(1.0, sum(loop() for _ in range(3)) / 3 / REFERENCE) * max(1.0, crowd)


def wrong_marks(
    found: Iterable[tuple[str, float, float]], times: float, all_ran: bool = True, skipped: Container[str] = ()
) -> list[str]:
    """Return a line for each budget that was exceeded without a mark or by far, or that is far too large. found: name,
    budget, and seconds of each phase of each test. times: how much slower than at the measurement this machine is.
    all_ran: False where only a part of every budget ran. skipped: names of budgets of which a test was skipped."""
    budgets, seconds = {}, Counter[str]()
    for name, budget, duration in found:
        budgets[name] = budget
        seconds[name] += duration / times
    lines = []
    for name, taken in seconds.items():
        marked, remedy = budgets[name] != LIMIT, f"pytest.mark.slow({max(1, round(taken))})"
        if not marked and taken > LIMIT:
            lines.append(f"{name} takes {taken:.1f} s: give it {remedy}")
        elif marked and taken > QUICKER * budgets[name]:
            lines.append(f"{name} takes {taken:.1f} s, not {budgets[name]:g}: give it {remedy}")
        elif marked and all_ran and name not in skipped and taken < budgets[name] / QUICKER:
            lines.append(
                f"{name} takes {taken:.1f} s, not {budgets[name]:g}: " + (remedy if taken > LIMIT else "no mark")
            )
    return lines

"""Cases in which any two choices meet at least once, in place of the product of all choices."""

import heapq
from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(possible: Callable[[dict[str, Any]], bool] = lambda case: True, /, **values: Iterable) -> list[dict]:
    """Return few cases, the same ones in each process, in which every two values of two names meet where a case that is
    `possible` has both. A fault that needs three values at once takes a case of its own, named beside these."""
    choices = [list(each) for each in values.values()]
    cases = []
    for indices in product(*(range(len(each)) for each in choices)):
        case = dict(zip(values, (each[i] for each, i in zip(choices, indices, strict=True)), strict=True))
        if possible(case):
            cases.append((case, set(combinations(enumerate(indices), min(2, len(choices))))))
    # A case meets ever fewer new pairs, so that an old count is a bound: only the first of the heap is counted anew.
    heap = [(-len(pairs), number) for number, (_, pairs) in enumerate(cases)]
    heapq.heapify(heap)
    met, chosen = set(), []
    while heap:
        bound, number = heapq.heappop(heap)
        case, pairs = cases[number]
        new = len(pairs - met)
        if new and new < -bound:
            heapq.heappush(heap, (-new, number))
        elif new:
            met |= pairs
            chosen.append(case)
    return chosen


def each_pair(
    possible: Callable[[dict[str, Any]], bool] = lambda case: True, /, corners: dict[str, dict] | None = None,
    **values: Iterable,
) -> pytest.MarkDecorator:  # fmt: skip
    """Return the mark that runs a test with the cases of `pairwise`, and with `corners`, which their names describe."""
    named = [pytest.param(*(case[name] for name in values), id=of) for of, case in (corners or {}).items()]
    cases = [tuple(case.values()) for case in pairwise(possible, **values)]
    return pytest.mark.parametrize(",".join(values), [*cases, *named], ids=str)

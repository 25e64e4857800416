"""Beam search on the host, with models that are tables of log-probabilities."""

import itertools
import math
from collections.abc import Callable
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtgpt.inference.beams.search import BeamRow, Beams, BeamSearch, Hypothesis, fp32
from dtgpt.util.errors import UserError

LogProbs = Callable[[tuple[int, ...]], list[float]]  # of every token after these


def run(search: BeamSearch, model: LogProbs) -> list[Hypothesis]:
    """The hypotheses of a search that ends."""
    rows: list[tuple[int, ...]] = [()]
    while rows:
        candidates = [likeliest(model(ids), search.alternatives) for ids in rows]
        rows = [(*rows[source], token) for source, token in search.advance(candidates)]
    return search.hypotheses


def likeliest(logprobs: list[float], count: int) -> list[tuple[int, float]]:
    return sorted(enumerate(logprobs), key=lambda entry: (-entry[1], entry[0]))[:count]


def table(*rows: list[float]) -> LogProbs:
    """A model whose log-probabilities depend on the position alone; those of the last row go on."""
    return lambda ids: rows[min(len(ids), len(rows) - 1)]


def shares(*probabilities: float) -> list[float]:
    return [fp32(math.log(p)) for p in probabilities]


@given(
    st.integers(0, 10**6), st.integers(1, 3), st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]), st.sets(st.integers(0, 2))
)
def test_a_search_that_is_wide_enough_finds_every_sequence(seed, limit, penalty, stops):
    def model(ids: tuple[int, ...]) -> list[float]:
        return [-fp32(1 + hash((seed, ids, token)) % 1000 / 100) for token in range(3)]

    wanted = []
    for length in range(1, limit + 1):
        for ids in itertools.product(range(3), repeat=length):
            ended = ids[-1] in stops
            if not any(i in stops for i in ids[:-1]) and (ended or length == limit):
                logprobs = [model(ids[:at])[token] for at, token in enumerate(ids)]
                total = reduce(lambda a, b: fp32(a + b), logprobs)
                wanted.append(Hypothesis(fp32(total / fp32(length**penalty)), list(ids), logprobs, ended))
    found = run(BeamSearch(Beams(width=len(wanted), length_penalty=penalty), limit, tuple(stops)), model)
    assert [h.score for h in found] == sorted((h.score for h in wanted), reverse=True)
    assert sorted(found) == sorted(wanted)


def test_one_beam_is_greedy():
    model = table(shares(0.2, 0.5, 0.3), shares(0.6, 0.3, 0.1), shares(0.1, 0.1, 0.8))
    (found,) = run(BeamSearch(Beams(width=1), 9, [2]), model)
    assert found.ids == [1, 0, 2] and found.ended
    assert found.score == pytest.approx(sum(found.logprobs) / 3) == pytest.approx(math.log(0.5 * 0.6 * 0.8) / 3)


def test_an_end_counts_only_among_the_best_of_the_width():
    first = BeamSearch(Beams(width=2), 2, [0])
    assert first.advance([[(0, -1.0), (1, -2.0), (2, -3.0), (3, -4.0)]]) == [BeamRow(0, 1), BeamRow(0, 2)]
    assert [h.ids for h in first.hypotheses] == [[0]]
    late = BeamSearch(Beams(width=2), 2, [0])
    assert late.advance([[(1, -1.0), (2, -2.0), (0, -3.0), (3, -4.0)]]) == [BeamRow(0, 1), BeamRow(0, 2)]
    assert late.hypotheses == []


def test_equal_sums_go_by_row_and_then_by_id():
    search = BeamSearch(Beams(width=3), 5)
    assert search.advance([[(4, -1.0), (2, -1.0), (7, -1.0), (1, -1.0)]]) == [
        BeamRow(0, 1),
        BeamRow(0, 2),
        BeamRow(0, 4),
    ]
    same = [(9, -1.0), (3, -1.0), (5, -2.0)]
    assert search.advance([same, same, same]) == [BeamRow(0, 3), BeamRow(0, 9), BeamRow(1, 3)]


def test_sums_that_are_equal_in_fp32_tie():
    search = BeamSearch(Beams(width=1), 5)
    search.advance([[(0, -1e6)]])
    assert search.advance([[(8, -1.001), (3, -1.002)]]) == [BeamRow(0, 3)]


def test_open_beams_are_closed_at_the_largest_length():
    found = run(BeamSearch(Beams(width=2, length_penalty=0.0), 3, [2]), table(shares(0.6, 0.3, 0.1)))
    assert [(h.ids, h.ended) for h in found] == [([0, 0, 0], False), ([0, 0, 1], False)]


@pytest.mark.parametrize("options, logprob, goes_on", [
    ({}, -3.6, True),  # the open beam has -3.8 / 2, the worst hypothesis -2.0
    ({}, -4.0, False),
    ({"early_stopping": True}, -3.6, False),
    ({"length_penalty": 0.0}, -3.6, False),
    ({"length_penalty": 3.0}, -4.0, True),
    ({"ended_bound": True}, -4.0, True),  # the one that ends has -0.5 / 2
    ({"length_penalty": 0.0, "ended_bound": True}, -4.0, True),
])  # fmt: skip
def test_when_the_search_ends(options, logprob, goes_on):
    search = BeamSearch(Beams(width=2, **options), 9, [0])
    assert search.advance([[(1, -0.2), (0, -2.0), (2, -3.0), (3, -9.0)]]) == [BeamRow(0, 1), BeamRow(0, 2)]
    rows = search.advance([[(0, -0.3), (1, logprob), (2, -9.0)], [(1, -9.0), (2, -9.0), (3, -9.0)]])
    assert rows == ([BeamRow(0, 1), BeamRow(0, 2)] if goes_on else [])
    assert [h.ids for h in search.hypotheses] == [[1, 0], [0]]


def test_a_token_of_probability_0_is_never_taken():
    never = -math.inf
    search = BeamSearch(Beams(width=2), 4)
    assert search.advance([[(3, -1.0), (4, never), (5, never), (6, never)]]) == [BeamRow(0, 3)]
    assert search.advance([[(1, never), (2, never)]]) == []
    assert [(h.ids, h.ended) for h in search.hypotheses] == [([3], False)]


@pytest.mark.parametrize("beams, choices, words", [
    (Beams(width=0), 1, "num_beams=0 cannot be searched over 10 tokens; use 1 to 5"),
    (Beams(width=6), 1, "num_beams=6 cannot be searched over 10 tokens; use 1 to 5"),
    (Beams(width=2.0), 1, "num_beams=2.0 cannot be searched over 10 tokens; use 1 to 5"),
    (Beams(width=5, length_penalty=math.nan), 1, "length_penalty=nan is not valid; use a number from -10 to 10"),
    (Beams(width=5, length_penalty="long"), 1, "length_penalty='long' is not valid; use a number from -10 to 10"),
    (Beams(width=2), 3, "num_beams=2 cannot give 3 sequences; use 3 or more beams"),
])  # fmt: skip
def test_what_cannot_be_searched_is_refused(beams, choices, words):
    with pytest.raises(UserError, match=words):
        beams.check(10, choices)

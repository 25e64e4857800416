"""Beam search over the continuations of one prompt, on the host: which rows go on, which hypotheses are kept.

The model runs elsewhere. Each step gives the likeliest tokens of every row; the search answers with the rows of the
next step, each a row of this step and a token after it. The rules are those of Megatron-LM of 2023 and of Hugging
Face's transformers, which differ in one: see `Beams.ended_bound`. Sums and scores are rounded to fp32 as theirs are, so
that what ties there ties here.
"""

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dtgpt.inference.base_options import Candidates
from dtgpt.inference.commands import copy
from dtgpt.inference.engine import Engine
from dtgpt.inference.request import NOT_FINITE, PromptJob, SequenceUpdate
from dtgpt.inference.sequence import ActiveJob
from dtgpt.inference.step import Step
from dtgpt.ops.sampling.sequences import Sampled
from dtgpt.util.errors import UserError, shown
from dtgpt.util.rules import Given, Is, Rule, Rules, check_rules

OPTIONS: Rules = (  # of a prompt
    Rule("max_new_tokens=0 leaves nothing to search; use 1 or more", Is("max_new_tokens", "==", 0)),
    Rule("a beam search does not return likeliest tokens; use top_logprobs=0, or no beams", Given("top_logprobs")),
    Rule(
        "a beam search cannot stop at two newlines; leave stop_on_double_eol out, or use no beams",
        Given("stop_on_double_eol"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Beams:
    """Choices of a beam search. Scores are sum of log-probabilities / length ** `length_penalty`, where the length is
    the number of new tokens with the one that ends the hypothesis."""

    width: int  # sequences that go on at each step, and hypotheses that are kept
    length_penalty: float = 1.0  # above 0: longer hypotheses gain
    early_stopping: bool = False  # end as soon as `width` hypotheses have ended, whatever open beams may reach
    # The search ends when no open beam scores above the worst kept hypothesis. True: when no candidate of the step
    # does, those that end included, which goes on longer (Megatron-LM of 2023, transformers before 4.50).
    ended_bound: bool = False

    def validate(self, request: PromptJob, vocab_size: int) -> None:
        """Raise UserError, one sentence, for a request that cannot be searched like this."""
        self.check(vocab_size, request.choices)
        check_rules(OPTIONS, request.options)

    def begin(self, request: PromptJob, slots: list[int]) -> "BeamSlots":
        """Return the search for a request whose first slot has read the prompt."""
        return BeamSlots(self, request, slots)

    def check(self, vocab_size: int, choices: int = 1) -> None:
        """Raise UserError, one sentence, if no model of `vocab_size` tokens can be searched like this, or if fewer than
        `choices` hypotheses are kept."""
        largest = vocab_size // 2
        if type(self.width) is not int or not 1 <= self.width <= largest:
            raise UserError(
                f"num_beams={shown(self.width)} cannot be searched over {vocab_size} tokens; use 1 to {largest}, since "
                "each step compares twice as many tokens"
            )
        penalty = self.length_penalty
        if type(penalty) not in (int, float) or not -10 <= penalty <= 10:  # powers of every length stay within fp32
            raise UserError(f"length_penalty={shown(penalty)} is not valid; use a number from -10 to 10")
        if choices > self.width:
            raise UserError(f"num_beams={self.width} cannot give {choices} sequences; use {choices} or more beams")


class BeamRow(NamedTuple):
    """A row of the next step: the row of this step that it continues, and the token that it adds."""

    source: int
    token: int


class Hypothesis(NamedTuple):
    """A finished sequence."""

    score: float
    ids: list[int]  # new tokens, with the one that ended it
    logprobs: list[float]  # of each of `ids`
    ended: bool  # by a stop token; else by the largest length, or because rules banned every token


class _Open(NamedTuple):
    """A sequence that goes on."""

    total: float = 0.0  # sum of `logprobs`, in fp32
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()

    def extend(self, token: int, logprob: float) -> "_Open":
        return _Open(fp32(self.total + logprob), (*self.ids, token), (*self.logprobs, logprob))


class BeamSearch:
    """The search after one prompt: `advance` with each step's candidates until it returns no rows.

    Among equal sums the smaller row comes first, then the smaller id; among equal scores the earlier hypothesis.
    """

    def __init__(self, beams: Beams, max_new_tokens: int, stop_ids: Sequence[int] = ()):
        self.beams, self.limit, self.stop_ids = beams, max_new_tokens, frozenset(stop_ids)
        self.length = 0  # new tokens of an open sequence
        self._open = [_Open()]
        self._kept: list[Hypothesis] = []

    @property
    def alternatives(self) -> int:
        """The number of likeliest tokens of each row that `advance` needs: if every stop token of every row is among
        the best, `width` others must remain."""
        return (1 + max(1, len(self.stop_ids))) * self.beams.width

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The hypotheses kept so far, best first."""
        return sorted(self._kept, key=lambda hypothesis: -hypothesis.score)

    def advance(self, candidates: Sequence[Candidates]) -> list[BeamRow]:
        """Return the rows of the next step; no rows: the search is over. `candidates`: of the one row of the first
        step, then of the rows that the last call returned, in that order. A token of probability 0 is not one."""
        best = self._best(candidates)
        if not best:  # rules have banned every token
            self._close()
            return []
        self.length += 1
        rows, opened = [], []
        for rank, (row, extended) in enumerate(best):
            if extended.ids[-1] not in self.stop_ids:
                rows.append(BeamRow(row, extended.ids[-1]))
                opened.append(extended)
            elif rank < self.beams.width:  # an end that is not likely enough is dropped, not kept
                self._keep(extended, ended=True)
            if len(rows) == self.beams.width:
                break
        self._open = opened
        if self.length == self.limit:
            self._close()
            return []
        if not rows or self._is_decided(best[0][1].total if self.beams.ended_bound else opened[0].total):
            return []
        return rows

    def _best(self, candidates: Sequence[Candidates]) -> list[tuple[int, _Open]]:
        """Return the best candidates over all rows, best first: each with the row that it continues."""
        if len(candidates) != len(self._open):
            raise ValueError(f"candidates of {len(candidates)} rows, but {len(self._open)} are open")
        found = [
            (self._rank(fp32(sequence.total + logprob), row, token), row, token, logprob)
            for row, (sequence, tokens) in enumerate(zip(self._open, candidates, strict=True))
            for token, logprob in tokens
            if logprob > -math.inf
        ]
        best = sorted(found)[: self.alternatives]
        return [(row, self._open[row].extend(token, logprob)) for _, row, token, logprob in best]

    def _rank(self, total: float, row: int, token: int) -> tuple[float, int, int]:
        """Return what orders candidates, the smallest first."""
        return -total, row, token

    def _score(self, total: float) -> float:
        """Return the score of a sequence of the current length."""
        return fp32(total / fp32(self.length**self.beams.length_penalty))

    def _close(self) -> None:
        """End the open sequences as they are."""
        for sequence in self._open:
            if sequence.ids:
                self._keep(sequence, ended=False)

    def _keep(self, sequence: _Open, ended: bool) -> None:
        """Keep a hypothesis of the current length if it is among the best `width`."""
        new = Hypothesis(self._score(sequence.total), list(sequence.ids), list(sequence.logprobs), ended)
        if len(self._kept) == self.beams.width:
            worst = min(self._kept, key=lambda hypothesis: hypothesis.score)
            if new.score <= worst.score:
                return
            self._kept.remove(worst)
        self._kept.append(new)

    def _is_decided(self, best: float) -> bool:
        """Return whether nothing can come any more that is better than what is kept, where `best` is the largest sum
        that counts: its score at the current length stands for what it may reach."""
        if len(self._kept) < self.beams.width:
            return False
        return self.beams.early_stopping or min(kept.score for kept in self._kept) >= self._score(best)


def assign(step: Step, slots: Sequence[int], tokens: Sequence[int]) -> None:
    """Replace the token that each slot has drawn last, on a rank."""
    state = step.cache.state
    rows, chosen = state.rows([slots, tokens])
    state.token[rows] = chosen
    state.history[rows, state.position[rows]] = chosen


class BeamSlots:
    """A search in slots of the cache, one for each row, which are copied as the search chooses. `slots[i]` is that of
    the request's choice i, of which some may be idle."""

    def __init__(self, beams: Beams, asked: PromptJob, slots: list[int]):
        self.asked, self.slots = asked, slots
        self.search = BeamSearch(beams, asked.options.max_new_tokens, asked.options.end_ids(asked.special))
        self._choices = [0]  # of the rows of the search, in their order

    @property
    def alternatives(self) -> int:
        """The number of likeliest tokens of each row that `advance` needs."""
        return self.search.alternatives

    def advance(
        self, engine: Engine, active: ActiveJob, rows: Mapping[int, int], results: Sampled
    ) -> list[SequenceUpdate]:
        """Choose the rows of the next step, or return the sequences that were found; see `_choose`."""
        if results.logprobs[list(rows.values())].isnan().any():
            return engine.end_all(active, NOT_FINITE)
        ids, logprobs = results.top_ids[:, 0].tolist(), results.top_logprobs[:, 0].tolist()
        candidates = {choice: list(zip(ids[row], logprobs[row], strict=True)) for choice, row in rows.items()}
        if chosen := self._choose(candidates, engine.command):
            scheduler: Any = engine.scheduler  # a `SearchScheduler`
            scheduler.go_on(active.number, chosen)
            return []
        engine.drop(active)
        return [
            active.add(choice, "stop" if found.ended else "length", found.ids, found.logprobs, [], found.score)
            for choice, found in enumerate(self._found())
        ]

    def _choose(self, candidates: Mapping[int, Candidates], command: Callable[..., Any]) -> list[int]:
        """Choose the rows of the next step from the likeliest tokens of each choice, and put them into slots. Return
        their choices; none: the search is over.

        The first row that continues another one stays in its slot, and the others are copied to idle slots: nothing is
        overwritten that is still read.
        """
        rows = self.search.advance([candidates[choice] for choice in self._choices])
        sources = [self._choices[row.source] for row in rows]
        idle = [choice for choice in range(len(self.slots)) if choice not in sources]
        copies: dict[int, int] = {}  # target -> source
        chosen = []
        for source in sources:
            target = source if source not in chosen else idle.pop()
            if target != source:
                copies[target] = source
            chosen.append(target)
        if copies:
            filled = len(self.asked.ids) + self.search.length - 1  # the last token is not in the cache yet
            command(copy, self._slots(copies.values()), self._slots(copies), filled, [])
        if rows:
            command(assign, self._slots(chosen), [row.token for row in rows])
        self._choices = chosen
        return chosen

    def _found(self) -> list[Hypothesis]:
        """Return the sequences that the request asks for, the best first."""
        best = self.search.hypotheses[: self.asked.choices]
        # Where rules leave few tokens, fewer sequences may have been found.
        return best + [Hypothesis(-math.inf, [], [], ended=False)] * (self.asked.choices - len(best))

    def _slots(self, choices: Iterable[int]) -> list[int]:
        return [self.slots[choice] for choice in choices]


def fp32(x: float) -> float:
    """Return the fp32 number nearest to `x`."""
    return ctypes.c_float(x).value

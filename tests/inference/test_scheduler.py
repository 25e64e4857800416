"""The scheduler: what holds for any arrival, end and cancellation of requests, searched by hypothesis."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtgpt.inference.scheduler import PromptChunk, Round, Row, Scheduler, Start

quick = settings(deadline=None, max_examples=150)


def test_a_request_is_prefilled_then_runs_in_rounds_up_to_its_last_token():
    scheduler = Scheduler(slots=2, chunk=4, longest_round=8)
    scheduler.add(7, prefill=6, choices=1, new_tokens=12)
    assert scheduler.next_round() == Round([PromptChunk(7, 0, 0, 4)], [], [], 0)
    row = Row(7, 0, 0)
    assert scheduler.next_round() == Round([PromptChunk(7, 0, 4, 6)], [Start(7, [0])], [row], 1)
    assert scheduler.next_round() == Round([], [], [row], 8)
    assert scheduler.next_round() == Round([], [], [row], 3)
    assert scheduler.next_round() is None and scheduler.busy
    scheduler.finish(7, 0)
    assert not scheduler.busy


def test_rounds_are_single_steps_while_a_prompt_is_read():
    scheduler = Scheduler(slots=2, chunk=4)
    scheduler.add(0, prefill=1, choices=1, new_tokens=30)
    scheduler.add(1, prefill=12, choices=1, new_tokens=30)
    rounds = [scheduler.next_round() for _ in range(4)]
    assert [(len(work.chunks), work.steps) for work in rounds] == [(1, 1), (1, 1), (1, 1), (1, 1)]
    assert scheduler.next_round().steps == 8


def test_a_request_that_waits_for_a_slot_does_not_shorten_rounds():
    scheduler = Scheduler(slots=1)
    for request in (0, 1):
        scheduler.add(request, prefill=1, choices=1, new_tokens=20)
    assert [scheduler.next_round().steps for _ in range(4)] == [1, 8, 8, 3]
    assert scheduler.next_round() is None
    scheduler.finish(0, 0)
    assert scheduler.next_round().starts == [Start(1, [0])]


def test_choices_share_a_prefill_and_wait_for_all_of_their_slots():
    scheduler = Scheduler(slots=3)
    scheduler.add(0, prefill=2, choices=1, new_tokens=4)
    scheduler.add(1, prefill=5, choices=3, new_tokens=4)
    scheduler.add(2, prefill=5, choices=1, new_tokens=4)  # fits, but is not first in line
    first = scheduler.next_round()
    assert [start.request for start in first.starts] == [0]
    scheduler.finish(0, 0)
    second = scheduler.next_round()
    assert len(second.chunks) == 1
    assert [(start.request, sorted(start.slots)) for start in second.starts] == [(1, [0, 1, 2])]


def test_a_request_cancelled_before_it_starts_leaves_its_slots_to_others():
    scheduler = Scheduler(slots=3, chunk=2)
    scheduler.add(0, prefill=4, choices=3, new_tokens=4)
    assert scheduler.next_round().chunks
    scheduler.cancel(0)
    scheduler.add(1, prefill=0, choices=3, new_tokens=4)
    (start,) = scheduler.next_round().starts
    assert start.request == 1 and sorted(start.slots) == [0, 1, 2]


def test_a_prompt_is_cut_at_the_same_positions_beside_others():
    scheduler = Scheduler(slots=3, chunk=10)
    for request, prefill in enumerate((7, 25, 3)):
        scheduler.add(request, prefill, choices=1, new_tokens=1)
    rounds = [scheduler.next_round() for _ in range(5)]
    cuts = [[(chunk.request, chunk.first, chunk.stop) for chunk in work.chunks] for work in rounds if work]
    assert cuts == [[(0, 0, 7)], [(1, 0, 10)], [(1, 10, 20)], [(1, 20, 25), (2, 0, 3)]]


def test_a_round_reads_more_prompts_while_nothing_decodes():
    scheduler = Scheduler(slots=6, chunk=10, idle_tokens=30)
    for request in range(3):
        scheduler.add(request, prefill=9, choices=1, new_tokens=1)
    assert [chunk.request for chunk in scheduler.next_round().chunks] == [0, 1, 2]
    scheduler.add(3, prefill=19, choices=1, new_tokens=5)  # requests that wait for their results do not decode
    assert [chunk[2:] for chunk in scheduler.next_round().chunks] == [(0, 10), (10, 19)]
    for request in (4, 5):
        scheduler.add(request, prefill=9, choices=1, new_tokens=1)
    assert [chunk.request for chunk in scheduler.next_round().chunks] == [4]


class Simulation:
    """Runs a scheduler as the engine does, and checks each round."""

    def __init__(self, slots: int, chunk: int, idle_tokens: int | None):
        self.scheduler, self.slots, self.chunk = Scheduler(slots, chunk, idle_tokens=idle_tokens), slots, chunk
        self.idle_tokens = max(chunk, idle_tokens or 0)
        self.asked: dict[int, tuple[int, int, int]] = {}  # prefill, choices, new tokens
        self.prefilled, self.launched = Counter(), Counter()
        self.started: list[int] = []
        self.slot_of: dict[tuple[int, int], int] = {}  # of choices that run
        self.live: set[tuple[int, int]] = set()

    def add(self, prefill: int, choices: int, new_tokens: int) -> None:
        request, choices = len(self.asked), min(choices, self.slots)
        self.asked[request] = prefill, choices, new_tokens
        self.live |= {(request, choice) for choice in range(choices)}
        self.scheduler.add(request, prefill, choices, new_tokens)

    def cancel(self, request: int) -> None:
        self.scheduler.cancel(request)
        for key in [key for key in self.live if key[0] == request]:
            self.end(key)

    def finish(self, key: tuple[int, int]) -> None:
        self.scheduler.finish(*key)
        self.end(key)

    def end(self, key: tuple[int, int]) -> None:
        self.live.remove(key)
        self.slot_of.pop(key, None)

    def round(self) -> Round | None:
        decoding = any(self.launched[key] < self.asked[key[0]][2] for key in self.slot_of)
        work = self.scheduler.next_round()
        if work is None:
            return None
        assert work.chunks or work.starts or work.rows
        tokens = [chunk.stop - chunk.first for chunk in work.chunks]
        assert max(tokens, default=0) <= self.chunk
        assert sum(tokens) <= (self.chunk if decoding else self.idle_tokens)
        for request, slot, first, stop in work.chunks:
            assert first == self.prefilled[request] and first % self.chunk == 0 and first < stop
            assert slot not in self.slot_of.values()
            self.prefilled[request] = stop
        for start in work.starts:
            assert self.prefilled[start.request] == self.asked[start.request][0]
            assert {(start.request, choice) for choice in range(len(start.slots))} == self.of(start.request)
            self.started.append(start.request)
            for choice, slot in enumerate(start.slots):
                assert slot in range(self.slots) and slot not in self.slot_of.values()
                self.slot_of[start.request, choice] = slot
        keys = [(row.request, row.choice) for row in work.rows]
        assert len(set(keys)) == len(keys) and all(self.slot_of[row[:2]] == row.slot for row in work.rows)
        left = [self.asked[request][2] - self.launched[request, choice] for request, choice in keys]
        assert all(number > 0 for number in left) and work.steps <= max([0, *left])
        assert (work.steps > 0) == bool(work.rows)
        for key in keys:
            self.launched[key] += work.steps
        return work

    def of(self, request: int) -> set[tuple[int, int]]:
        return {key for key in self.live if key[0] == request}


@pytest.mark.slow(2)
@quick
@given(st.data(), st.integers(1, 5), st.integers(1, 9), st.none() | st.integers(1, 40))
def test_every_request_ends_in_order_and_no_slot_is_used_twice(data, slots, chunk, idle_tokens):
    """Requests come and are cancelled at any time, and sequences end before their last token."""
    run = Simulation(slots, chunk, idle_tokens)
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "round", "cancel", "finish"]))
        if action == "add":
            run.add(data.draw(st.integers(0, 20)), data.draw(st.integers(1, 5)), data.draw(st.integers(0, 20)))
        elif action == "round":
            run.round()
        elif action == "cancel" and run.asked:
            run.cancel(data.draw(st.integers(0, len(run.asked) - 1)))
        elif action == "finish" and run.slot_of:
            run.finish(data.draw(st.sampled_from(sorted(run.slot_of))))
    for _ in range(1000):
        if run.round() is None:
            for key in [key for key in run.slot_of if run.launched[key] >= run.asked[key[0]][2]]:
                run.finish(key)
        if not run.live:
            break
    assert not run.live and not run.scheduler.busy
    assert run.started == sorted(run.started)
    run.add(0, slots, 1)  # all slots are free again
    assert len(run.round().rows) == slots


@pytest.mark.parametrize("request_of", [0, 5])
def test_cancelling_what_is_finished_or_unknown_does_nothing(request_of):
    scheduler = Scheduler(slots=1)
    scheduler.add(0, prefill=0, choices=1, new_tokens=1)
    scheduler.next_round()
    scheduler.finish(0, 0)
    scheduler.cancel(request_of)
    assert not scheduler.busy and scheduler._free == [0]

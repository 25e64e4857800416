"""Sequences whose next ids the host allows: their texts, those beside them, under plans; ends; bits."""

from dataclasses import replace

import pytest
import torch

from dtgpt.inference.cache import ALL, SlotState
from dtgpt.inference.grammar.engine import GuidedScheduler, allow_ids
from dtgpt.inference.options import Options
from dtgpt.inference.scheduler import Scheduler
from tests.inference.test_engine import CONFIG, alone, engine_of
from tests.support import bodies_engine as bodies
from tests.support.engines import drain
from tests.support.guides import STEP, GuidedOptions
from tests.support.ranks import pool
from tests.support.requests import make_request
from tests.support.whole_model import build_model

pytestmark = pytest.mark.slow(4)

GUIDED = [
    make_request(ids=[5], sampling=GuidedOptions(max_new_tokens=9, seed=1), choices=2),
    make_request(ids=[5, 90, 17], sampling=GuidedOptions(max_new_tokens=9, top_k=40, seed=2)),
    make_request(ids=[7] * 9, sampling=GuidedOptions(max_new_tokens=9, temperature=0), prompt_index=3, alternatives=2),
]
FREE = [
    make_request(ids=[5], sampling=Options(max_new_tokens=12, seed=1, ends=False), choices=2),
    make_request(ids=[3, 4], sampling=Options(max_new_tokens=12, top_p=0.8, seed=4, ends=False), prompt_index=1),
]


def fields_of(events):
    """Return tokens, log-probabilities, alternatives and ends of the sequences of each job."""
    return {
        event.job: [(one.ids, one.logprobs, one.alternatives, one.finish_reason) for one in event.completions]
        for event in events
        if event.completions is not None
    }


def told(sequences):
    """Return tokens and ends, without numbers that round otherwise in another batch."""
    return [(ids, finish) for ids, _, _, finish in sequences]


@pytest.fixture(scope="module")
def expected():
    return [fields_of(alone(request))[0] for request in (*GUIDED, *FREE)]


def test_a_text_keeps_to_its_guide_and_ends_with_it(expected):
    for sequences in expected[: len(GUIDED)]:
        for ids, _, _, finish in sequences:
            assert [token % STEP for token in ids] == [t % STEP for t in range(6)] and finish == "stop"
    (first, *_), (second, *_) = expected[0]
    assert first != second  # choices have draws of their own
    short = replace(GUIDED[1], options=replace(GUIDED[1].options, max_new_tokens=4))
    (cut,) = fields_of(alone(short))[0]
    assert cut[0] == expected[1][0][0][:4] and cut[3] == "length"


def test_log_probabilities_are_those_before_the_guide(expected):
    whole = build_model(CONFIG, bodies.CPU, torch.float32, bodies.KEY)
    for request, sequences in zip(GUIDED, expected, strict=False):
        ids, logprobs = sequences[0][:2]
        logits = bodies.whole_logits(whole, [*request.ids, *ids])[len(request.ids) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("slots", [3, 8])
def test_neither_a_guided_text_nor_one_beside_it_changes_in_company(expected, slots):
    """All at once, in slots that others have used before."""
    engine = engine_of(slots)
    for _ in range(2):
        numbers = [engine.submit(request) for request in (*GUIDED, *FREE, *GUIDED)]
        found = fields_of(drain(engine))
        for number, wanted in zip(numbers, [*expected, *expected[: len(GUIDED)]], strict=True):
            assert told(found[number]) == told(wanted)
            for one, other in zip(found[number], wanted, strict=True):
                torch.testing.assert_close(torch.tensor(one[1]), torch.tensor(other[1]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("plan, world", [("tp2_pp2", 4), ("pp2", 2)])
def test_a_guided_text_is_the_same_under_a_plan(expected, plan, world):
    events = pool().run(world, bodies.generate, CONFIG, plan, [*GUIDED, *FREE], 4, False)[0]
    found = fields_of(events)
    assert [told(found[job]) for job in range(len(expected))] == [told(sequences) for sequences in expected]


def test_where_nothing_may_come_a_text_is_cut():
    """The guide allows ids that the model does not have."""
    options = GuidedOptions(guided_vocabulary=300, guided_first=CONFIG.vocab_size, max_new_tokens=9)
    (found,) = fields_of(alone(make_request(ids=[5], sampling=options)))[0]
    assert found[0] == [] and found[3] == "length"


def test_a_job_that_is_cancelled_leaves_its_slot_to_others(expected):
    engine = engine_of(2)
    first = engine.submit(GUIDED[0])
    engine.step()
    engine.cancel(first)
    number = engine.submit(GUIDED[1])
    assert told(fields_of(drain(engine))[number]) == told(expected[1])


def test_rows_that_wait_take_single_steps_and_leave_rounds_to_others():
    scheduler = Scheduler(slots=3)
    scheduler.add(0, prefill=0, choices=2, new_tokens=9, asked=GUIDED[0])
    scheduler.add(1, prefill=0, choices=1, new_tokens=9, asked=FREE[1])
    begun = scheduler.next_round()
    assert len(begun.rows) == 3 and begun.steps == 1
    alone = scheduler.next_round()
    assert [row.request for row in alone.rows] == [1] and alone.steps == 1  # a result is awaited
    assert isinstance(scheduler, GuidedScheduler)
    scheduler.allow_step(0, 1)
    assert [(row.request, row.choice) for row in scheduler.next_round().rows] == [(0, 1), (1, 0)]
    for choice in (0, 1):
        scheduler.finish(0, choice)
    assert scheduler.next_round().steps == 6


def test_words_of_any_width_become_those_of_the_vocabulary():
    state = SlotState(2, 8, "cpu")
    assert state.allowed.shape == (3, 0)  # no memory before a sequence is guided
    allow_ids(state, [1], torch.tensor([[5]], dtype=torch.int32), 40)
    assert state.allowed.tolist() == [[ALL, ALL], [5, 0], [ALL, ALL]]
    allow_ids(state, [0], torch.tensor([[1, 2, 3]], dtype=torch.int32), 40)
    memory = state.allowed.data_ptr()
    state.copy(torch.tensor([0]), torch.tensor([2]))
    assert state.allowed.tolist() == [[1, 2], [5, 0], [1, 2]] and state.allowed.data_ptr() == memory
    state.set(1, SlotState.encode([3], Options(), GUIDED[0].special, 0, 0))
    assert state.allowed[1].tolist() == [ALL, ALL]  # a sequence without a guide may have all ids

"""Beam searches on the engine, beside what test_against_transformers.py and test_same_text.py compare."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dtgpt.config.plan import Plan
from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.beams.search import Beams, assign
from dtgpt.inference.cache import SlotState
from dtgpt.inference.engine import Engine
from dtgpt.inference.options import Options
from dtgpt.inference.request import PromptJob
from dtgpt.inference.scheduler import Row, Scheduler
from dtgpt.models.decoder import Decoder
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.errors import UserError
from tests.support.engines import CPU, drain, engine_of, events_of, scores_of
from tests.support.requests import make_request
from tests.support.whole_model import build_model

CONFIG = GPT2Config(num_layers=1, hidden_size=32, num_heads=2, seq_length=24, vocab_size=61, init_std=0.4)
PROMPT_IDS = [5, 9, 33]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return build_model(CONFIG, CPU, torch.float32, root_key(3))


def asked(width: int = 3, **changes) -> PromptJob:
    sampling = changes.pop("sampling", Options(max_new_tokens=8))
    return make_request(ids=PROMPT_IDS, sampling=sampling, search=Beams(width=width), **changes)


def test_one_event_has_all_of_a_sequence(model):
    events = events_of(model, asked(choices=2, score_prompt=True))
    assert [event.choice for event in events] == [0, 1] and len(events[0].prompt.logprobs) == 2
    assert all(len(event.ids) == len(event.logprobs) == 8 and event.finish == "length" for event in events)
    first, second = scores_of(events)
    assert first > second and first == pytest.approx(sum(events[0].logprobs) / 8)


def test_the_end_of_text_ends_a_sequence_and_is_its_last_token(model):
    free = events_of(model, asked())[0].ids
    special = SpecialIds(ends=(free[3],))
    ended = [event for event in events_of(model, asked(special=special, choices=3)) if event.finish == "stop"]
    assert ended and all(event.ids.index(free[3]) == len(event.ids) - 1 for event in ended)
    endless = asked(special=special, sampling=Options(max_new_tokens=8, ends=False))
    assert events_of(model, endless)[0].ids == free


def test_a_search_is_cancelled_as_a_whole_and_leaves_its_slots(model):
    with engine_of(model, slots=3) as engine:
        first, second = engine.submit(asked(choices=2)), engine.submit(asked())
        for _ in range(3):
            assert engine.step() == []
        engine.cancel(first)
        events = drain(engine)
    assert [(e.job, e.choice, e.finish) for e in events] == [
        (first, 0, "cancelled"), (first, 1, "cancelled"), (second, 0, "length"),
    ]  # fmt: skip
    assert events[-1].ids == events_of(model, asked())[0].ids


def test_where_rules_ban_every_token_sequences_end_as_they_are(model):
    """No token may come twice, and the prompt has 2 of 4."""
    small = build_model(replace(CONFIG, vocab_size=4), CPU, torch.float32, root_key(3))
    sampling = Options(max_new_tokens=5, no_repeat_ngram_size=1)

    def found(ids: list[int]) -> list[tuple]:
        request = make_request(ids=ids, sampling=sampling, search=Beams(width=2), choices=2)
        return [(event.ids, event.finish) for event in events_of(small, request)]

    assert sorted(found([0, 1])) == [([2, 3], "length"), ([3, 2], "length")]
    assert found([0, 1, 2]) == [([3], "length"), ([], "length")]


def test_a_search_takes_a_step_when_it_is_told_to_and_others_take_single_steps_beside_it():
    scheduler = Scheduler(slots=4)
    scheduler.add(0, prefill=0, choices=3, new_tokens=9, asked=make_request([1], Options(), search=Beams(width=3)))
    scheduler.add(1, prefill=0, choices=1, new_tokens=9)
    beams, other = [Row(0, choice, choice) for choice in range(3)], Row(1, 0, 3)
    first = scheduler.next_round()
    assert (first.rows, first.steps) == ([beams[0], other], 1)
    waiting = scheduler.next_round()
    assert (waiting.rows, waiting.steps) == ([other], 1)
    scheduler.go_on(0, [2, 0])
    assert scheduler.next_round().rows == [beams[0], beams[2], other]
    for choice in range(3):
        scheduler.finish(0, choice)
    assert scheduler.next_round().steps == 6


@pytest.mark.parametrize("changes, words", [
    ({"width": 5}, "5 beams of a prompt need as many slots of the cache, which has 4"),
    ({"width": 31}, "num_beams=31 cannot be searched over 61 tokens; use 1 to 30"),
    ({"choices": 4}, "num_beams=3 cannot give 4 sequences; use 4 or more beams"),
    ({"alternatives": 1}, "a beam search does not return likeliest tokens"),
    ({"sampling": Options(max_new_tokens=2, stop_on_double_eol=True)}, "a beam search cannot stop at two newlines"),
    ({"sampling": Options(max_new_tokens=0), "score_prompt": True}, "max_new_tokens=0 leaves nothing to search"),
])  # fmt: skip
def test_what_cannot_be_searched_is_refused(model, changes, words):
    with engine_of(model, slots=4) as engine, pytest.raises(UserError, match=words):
        engine.submit(asked(**changes))


def test_tokens_of_slots_are_replaced():
    state = SlotState(3, 16, "cpu")
    for slot in range(3):
        state.set(slot, SlotState.encode([slot] * (slot + 1), Options(), SpecialIds(), 0, 0))
    state.record(torch.arange(3), torch.tensor([30, 31, 32]))
    assign(SimpleNamespace(cache=SimpleNamespace(state=state)), [2, 0], [40, 41])
    assert state.token[:3].tolist() == [41, 31, 40]
    assert state.history[2, :4].tolist() == [2, 2, 2, 40] and state.history[0, :2].tolist() == [0, 41]


@pytest.mark.cuda
def test_beams_on_a_gpu_are_those_of_the_cpu(model):
    """The steps are CUDA graphs there, also those whose rules ban tokens."""
    cuda = torch.device("cuda")
    there = build_model(CONFIG, cuda, torch.float32, root_key(3))
    engine = Engine([there], Mesh(Plan().for_world(1), cuda), CONFIG, torch.float32, slots=6, graphs=True)
    sampling = Options(max_new_tokens=12, min_new_tokens=3, no_repeat_ngram_size=2, stop_token_ids=(7, 8))
    requests = [asked(choices=3), asked(width=5, choices=5, sampling=sampling), asked(choices=1, sampling=sampling)]
    handles = [engine.submit(request) for request in requests]
    events = drain(engine)
    engine.release()
    for handle, request in zip(handles, requests, strict=True):
        found = [event for event in events if event.job == handle]
        wanted = events_of(model, request)
        assert [(event.ids, event.finish) for event in found] == [(event.ids, event.finish) for event in wanted]
        assert scores_of(found) == pytest.approx(scores_of(wanted), rel=1e-4)

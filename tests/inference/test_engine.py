"""The engine: a text is a function of its request alone, under every plan; ends, scores, refusals, failures."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.engine import Engine
from dtgpt.inference.options import Options
from dtgpt.inference.request import NOT_FINITE
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.util.errors import UserError
from tests.support import bodies_engine as bodies
from tests.support.other_architecture import GroupedConfig, OtherConfig
from tests.support.ranks import pool, several
from tests.support.requests import make_request
from tests.support.whole_model import build_model

pytestmark = pytest.mark.slow(11)

LENGTH, VOCABULARY = 24, 131
SHAPE = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "seq_length": LENGTH, "vocab_size": VOCABULARY}
CONFIGS = {config: config(**SHAPE, init_std=0.3) for config in (GPT2Config, OtherConfig, GroupedConfig)}
CONFIG = CONFIGS[GPT2Config]
# The stages of `dtgpt.load` under other plans: test_inference.py. The last plan of each line is rare.
INFERENCE = {"single": 1, "tp2_pp2": 4, "tp4": 4}
TRAINING = {"tp2_sp": 2, "pp2_interleaved": 2, "pp2_zbv": 2, "dp2_tp2_sp_zero3": 4, "tp4_sp": 4}
GREEDY = Options(max_new_tokens=6, temperature=0, ends=False)
FEW = 4  # tokens of texts under plans
PROMPTS = [[5], [5, 90, 17], list(range(18)), [3, 4, 5, 6, 7, 8], [130]]


def greedy_text(config, prompt, new_tokens):
    """By the whole model, which computes each token anew."""
    model, ids = build_model(config, bodies.CPU, torch.float32, bodies.KEY), list(prompt)
    for _ in range(new_tokens):
        ids.append(int(bodies.whole_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def alone(request, config=CONFIG):
    """Return the events of a request that nobody else is beside."""
    return bodies.generate(config, "single", [request], slots=request.choices, training=False)


def engine_of(slots, config=CONFIG, **choices):
    stages, mesh = bodies.inference_stages(config, "single")
    return Engine(stages, mesh, config, torch.float32, slots, **choices)


@pytest.fixture(scope="module")
def expected():
    """Return what gives greedy texts of an architecture with so many blocks, and draws of one process, each made
    once."""
    requests = [
        make_request(ids=ids, sampling=sampling_of(index), choices=1 + index % 2) for index, ids in enumerate(PROMPTS)
    ]

    @functools.cache
    def greedy(config):
        return [greedy_text(config, ids, FEW) for ids in PROMPTS]

    @functools.cache
    def drawn(config):
        return {(index, choice): ids for index, request in enumerate(requests)
                for (_, choice), ids in bodies.texts(alone(request, config)).items()}  # fmt: skip

    return greedy, requests, drawn


def asked_greedily():
    return [make_request(ids=ids, sampling=replace(GREEDY, max_new_tokens=FEW)) for ids in PROMPTS]


def sampling_of(seed):
    """A request of every kind."""
    rules = [
        {}, {"top_k": 9}, {"top_p": 0.8, "frequency_penalty": 0.5}, {"no_repeat_ngram_size": 2}, {"temperature": 0},
    ]  # fmt: skip
    return Options(
        **{"max_new_tokens": FEW, "seed": seed, "temperature": 1.5, "ends": False} | rules[seed % len(rules)]
    )


@pytest.mark.parametrize(
    "training, plan",
    [pytest.param(training, plan, marks=[pytest.mark.long] * ("tp4" in plan))
     for training, plans in ((False, INFERENCE), (True, TRAINING)) for plan in plans],
)  # fmt: skip
def test_texts_are_the_same_under_every_plan(expected, plan, training):
    """More requests than slots, in memory of NaN, with stages of `dtgpt.load` and of training."""
    greedy, requests, drawn = expected
    asked = asked_greedily()
    kinds = [GroupedConfig] if training else list(CONFIGS)
    if "tp4" in plan:  # it has two heads of keys
        kinds.remove(GroupedConfig)
    blocks = 4 if "pp2" in plan else 2  # two on a rank
    *configs, config = (replace(CONFIGS[kind], num_layers=blocks) for kind in (*kinds, GPT2Config))
    calls = [(bodies.generate, config, plan, asked, 3, training) for config in configs]
    calls.append((bodies.generate, config, plan, requests, 4, training))  # some of them greedy
    *found, events = pool().run((TRAINING if training else INFERENCE)[plan], several, calls)[0]
    for each, own in zip(configs, found, strict=True):
        assert bodies.texts(own) == {(index, 0): ids for index, ids in enumerate(greedy(each))}
    assert bodies.texts(events) == drawn(config)


def test_a_vocabulary_that_tp_cuts_unevenly():
    config = GPT2Config(**SHAPE | {"num_heads": 3, "hidden_size": 24, "num_layers": 1}, init_std=0.3)
    asked = asked_greedily()
    wanted = {(i, 0): greedy_text(config, ids, FEW) for i, ids in enumerate(PROMPTS)}
    calls = [(bodies.generate, config, "tp3", asked, 2, training) for training in (False, True)]
    assert [bodies.texts(events) for events in pool().run(3, several, calls)[0]] == [wanted] * 2


@pytest.mark.compiler
def test_compiled_stages_of_training_run_eagerly(expected):
    asked = asked_greedily()
    stages, mesh = bodies.training_stages(CONFIG, "single", compile=True)
    with torch.compiler.set_stance("force_eager"):
        events = bodies.serve(Engine(stages, mesh, CONFIG, torch.float32, 2), asked)
    assert [bodies.texts(events)[index, 0] for index in range(len(PROMPTS))] == expected[0](CONFIG)


@pytest.mark.parametrize("plan, world", [("single", 1), ("tp2_pp2", 4), ("pp2_zbv", 2)])
def test_prompts_up_to_the_whole_length_are_scored_and_new_tokens_are_too(plan, world):
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in (1, 2, 9, LENGTH)]
    asked = [
        make_request(ids=ids, sampling=Options(max_new_tokens=0), score_prompt=True, alternatives=3) for ids in prompts
    ]
    asked.append(make_request(ids=[5, 90], sampling=GREEDY, alternatives=3))
    events = pool().run(world, bodies.generate, CONFIG, plan, asked, 1, False)[0]
    model = build_model(CONFIG, bodies.CPU, torch.float32, bodies.KEY)

    def check(found, ids, first):
        expected = torch.log_softmax(bodies.whole_logits(model, ids), dim=-1)[first - 1 : -1]
        wanted = expected.gather(1, torch.tensor(ids[first:]).view(-1, 1)).flatten().tolist()
        assert [x for event in found for x in event.logprobs] == pytest.approx(wanted, abs=1e-4)
        rows, (values, tokens) = [row for event in found for row in event.alternatives], expected.topk(3)
        assert [[token for token, _ in row] for row in rows] == tokens.tolist()
        for row, likeliest in zip(rows, values.tolist(), strict=True):
            assert [x for _, x in row] == pytest.approx(likeliest, abs=1e-4)
        return (expected.argmax(1) == torch.tensor(ids[first:])).tolist()

    for index, ids in enumerate(prompts):
        (end,) = (event for event in events if event.job == index)
        assert end.prompt.ids == ids and end.prompt.greedy == check([end.prompt], ids, 1)
        assert (end.choice, end.ids, end.finish) == (0, [], "length")
    found = [event for event in events if event.job == len(prompts)]
    assert all(check(found, [5, 90, *(token for event in found for token in event.ids)], 2))


SPECIAL = SpecialIds(ends=(9,), newline=1, double_newline=2, colon=3)


@pytest.mark.parametrize("rules, prompt, tokens, length", [
    ({}, [5], [1, 1, 2, 9, 4], 4), ({"ends": False}, [5], [1, 9, 9], None),
    ({"stop_token_ids": (4, 7)}, [5], [1, 7, 4], 2), ({"stop_on_eol": True}, [5], [9, 1, 4], 2),
    ({"stop_on_eol": True}, [5], [9, 2, 4], 2), ({"stop_on_double_eol": True}, [5], [9, 1, 4, 1, 1], 5),
    ({"stop_on_double_eol": True}, [5, 1], [1, 4], 1),
    ({"stop_on_double_eol": True, "stop_on_eol": True}, [5], [1, 4, 2], 3),
    ({"min_new_tokens": 2, "stop_on_double_eol": True}, [5, 1], [1, 1, 1, 4], 3),
])  # fmt: skip
def test_ends_by_ids(rules, prompt, tokens, length):
    request = make_request(ids=prompt, sampling=Options(**rules), special=SPECIAL)
    before = [prompt[-1], *tokens]
    ends = [
        index
        for index, token in enumerate(tokens)
        if request.options.ends_at(request.special, before[index], token, index)
    ]
    assert (ends[0] + 1 if ends else None) == length


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_tokens_of_a_round_end_a_sequence_where_one_by_one_they_do(data):
    rules = [{}, {"ends": False}, {"stop_token_ids": (4, 7)}, {"stop_on_eol": True}, {"stop_on_double_eol": True}]
    more = {
        "min_new_tokens": data.draw(st.integers(0, 4)),
        "no_repeat_ngram_size": data.draw(st.integers(0, 2)),
        "max_new_tokens": data.draw(st.integers(4, 9)),
    }
    few = st.sampled_from([0, 1, 1, 2, 4, 9])  # so that pairs of newlines come
    some = st.lists(few, max_size=3)
    sampling = Options(**data.draw(st.sampled_from(rules)), **more)
    request, new = make_request(ids=[5, *data.draw(some)], sampling=sampling, special=SPECIAL), data.draw(some)
    values = st.sampled_from([-1.0] * 20 + [-math.inf, math.nan])
    drawn = data.draw(st.lists(st.tuples(few, values), min_size=1, max_size=6))
    ids, finish, count = [*request.ids, *new], None, 0
    for token, logprob in drawn:
        if math.isnan(logprob) or request.options.bans_all(
            request.special, request.ids, ids[len(request.ids) :], token, logprob
        ):
            finish = NOT_FINITE if math.isnan(logprob) else "length"
            break
        count += 1
        if request.options.ends_at(request.special, ids[-1], token, len(ids) - len(request.ids)):
            finish = "stop"
            break
        ids.append(token)
        if len(ids) - len(request.ids) == sampling.max_new_tokens:
            finish = "length"
            break
    assert request.accept(new, [token for token, _ in drawn], [value for _, value in drawn]) == (count, finish)


def test_a_sequence_ends_with_the_token_that_stops_it_and_its_slot_serves_the_next():
    text = greedy_text(CONFIG, PROMPTS[1], 6)
    stop = next(i for i in range(1, 6) if text[i] not in text[:i])
    sampling = replace(GREEDY, stop_token_ids=(text[stop],))
    requests = [make_request(ids=PROMPTS[1], sampling=sampling), make_request(ids=PROMPTS[2], sampling=GREEDY)]
    events = bodies.generate(CONFIG, "single", requests, slots=1, training=False)
    assert bodies.texts(events) == {(0, 0): text[: stop + 1], (1, 0): greedy_text(CONFIG, PROMPTS[2], 6)}
    assert [event.finish for event in events if event.finish] == ["stop", "length"]


def test_an_engine_serves_again_after_release_and_the_stages_are_plain_in_between():
    stages, mesh = bodies.inference_stages(CONFIG, "single")
    engine = Engine(stages, mesh, CONFIG, torch.float32, 2)
    before = bodies.whole_logits(stages[0], PROMPTS[2])
    request = make_request(ids=PROMPTS[1], sampling=GREEDY)
    first = bodies.serve(engine, [request])
    assert torch.equal(bodies.whole_logits(stages[0], PROMPTS[2]), before)
    engine.submit(request)
    engine.step()
    engine.release()
    assert not engine.busy
    again = bodies.serve(engine, [request])
    assert bodies.texts(again).values() and list(bodies.texts(again).values()) == list(bodies.texts(first).values())


@pytest.mark.parametrize("more", [{}, {"temperature": 0.0}, {"top_k": 2}], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_text_ends_where_no_token_is_left_that_repeats_no_ngram(n, more):
    """Over two ids, each n-gram can come once: the text ends, rather than to repeat id 0."""
    engine = engine_of(1, vocab_size=2)
    sampling = Options(**{"max_new_tokens": 20, "ends": False, "no_repeat_ngram_size": n, **more})
    engine.submit(make_request(ids=[1], sampling=sampling))
    events = [event for _ in range(9) for event in engine.step()]
    ids = [1, *(token for event in events for token in event.ids)]
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    assert len(grams) == len(set(grams)) and 1 < len(ids) < 20 and not engine.busy
    assert events[-1].finish == "length" and [event.finish for event in events[:-1]] == [None] * (len(events) - 1)
    assert all(len(event.ids) == len(event.logprobs) for event in events)
    ends = {(*ids[len(ids) - n + 1 :], token) for token in (0, 1)}
    assert ends <= set(grams)  # nothing was left indeed


def test_rules_that_leave_no_token_end_a_text():
    """The newline, id 0 of many character vocabularies, is banned after a colon; an end, before min_new_tokens."""
    special = SpecialIds(newline=0, colon=1)
    rules = {"prevent_newline_after_colon": True, "no_repeat_ngram_size": 1}
    for sampling in (
        Options(max_new_tokens=5, **rules),
        Options(max_new_tokens=5, min_new_tokens=5, stop_token_ids=(0,), no_repeat_ngram_size=1),
    ):
        engine = engine_of(1, vocab_size=2)
        engine.submit(make_request(ids=[1], sampling=sampling, special=special))
        (event,) = [event for _ in range(3) for event in engine.step()]
        assert (event.ids, event.finish) == ([], "length")


def test_ids_of_padding_and_beyond_the_tokenizer_are_never_drawn():
    engine = engine_of(1, vocab_size=7)
    engine.submit(make_request(ids=[5], sampling=Options(max_new_tokens=20, temperature=50.0, ends=False)))
    drawn = [token for _ in range(9) for event in engine.step() for token in event.ids]
    assert len(drawn) == 20 and max(drawn) < 7
    for wrong in (
        make_request(ids=[7], sampling=GREEDY),
        make_request(ids=[5], sampling=replace(GREEDY, logit_bias={7: 1.0})),
    ):
        with pytest.raises(UserError, match="0 to 6"):  # the logits of such an id are cut off
            engine.submit(wrong)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"ids": []}, "the prompt is empty; give"),
        ({"ids": [3, VOCABULARY]}, f"ids 3 to {VOCABULARY} are not all tokens of this model; use 0 to 130"),
        ({"ids": [-1]}, "ids -1 to -1"),
        ({"ids": [1] * 20}, "a prompt of 20 tokens and max_new_tokens=6 need 26 positions, but the model has 24; use"),
        ({"ids": [1] * 20}, "use max_new_tokens=4 or less, or a shorter prompt"),
        ({"ids": [1] * 24}, "the model has 24; use a shorter prompt"),
        ({"ids": [1] * 30}, "the model has 24; use a shorter prompt"),
        (
            {"ids": [1] * 30, "sampling": replace(GREEDY, max_new_tokens=0), "score_prompt": True},
            "a prompt of 30 tokens does not fit into the model's 24 positions; use a shorter one",
        ),
        ({"choices": 3}, "3 choices of a prompt need as many slots of the cache, which has 2; use 1 to 2"),
        ({"choices": 0}, "num_return_sequences=0 is not valid; use a whole number from 1 to 128"),
        ({"sampling": replace(GREEDY, max_new_tokens=0)}, "max_new_tokens=0 generates nothing; use 1 or more"),
        ({"sampling": replace(GREEDY, temperature=math.nan)}, "temperature=nan"),
        ({"alternatives": 65}, "top_logprobs=65 is not valid; use a whole number from 0 to 20"),
        ({"alternatives": -1}, "top_logprobs=-1"),
    ],
)  # fmt: skip
def test_a_request_that_can_never_be_served_is_refused_in_one_sentence(changes, words):
    engine = engine_of(2)
    with pytest.raises(UserError) as error:
        engine.submit(make_request(**{"ids": [5], "sampling": GREEDY, **changes}))
    assert words in str(error.value) and "\n" not in str(error.value) and ";" in str(error.value)
    assert not engine.busy


@pytest.mark.parametrize("failing", [0, 1])
def test_where_a_rank_fails_all_ranks_end_with_its_reason(failing):
    said = pool().run(2, bodies.failing, CONFIG, "pp2", failing)
    other = said[1 - failing]
    assert said[failing] == "ValueError: the device is on fire" and "\n" not in other
    assert "another process of the run" in other and f"rank {failing}: the device is on fire" in other

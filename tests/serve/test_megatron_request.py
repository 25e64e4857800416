"""The keys of Megatron-LM's `PUT /api`: which values are refused, with which sentence, in which order."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtgpt.serve.megatron_request import LARGEST_SEED, NOT_TEXTS, read_request
from dtgpt.util.errors import UserError
from tests.support.megatron_rules import FAILS, MEGATRON, OURS, refusal

SWITCHES = ("logprobs", "add_BOS", "stop_on_double_eol", "stop_on_eol", "prevent_newline_after_colon", "no_log")
NUMBERS = (
    "tokens_to_generate", "temperature", "top_k", "top_p", "top_p_decay", "top_p_bound", "random_seed", "beam_width",
    "stop_token", "length_penalty",
)  # fmt: skip
ANYTHING = st.sampled_from([None, True, False, "x", "", [], {}, [1], 0, 1, -1, 2, 1000, 1001, 10**30, -(10**400)]) | (
    st.sampled_from([0.0, -0.0, 0.25, 0.5, 1.0, 1.5, -0.5, 100.0, 100.5, 1e300])
)
PROMPTS = st.lists(st.sampled_from(["a", "b c", "", 3, None, [], ["a"]]), max_size=3) | st.sampled_from(
    ["x", None, 5, {}, ["a"], ["a"] * 128, ["a"] * 129]
)
REQUESTS = st.builds(
    lambda prompts, *parts: {key: value for part in (*parts, prompts) for key, value in part.items()},
    st.fixed_dictionaries({"prompts": st.just(["Hello"]) | PROMPTS}) | st.just({}),
    st.dictionaries(st.sampled_from(NUMBERS), ANYTHING, max_size=4),
    st.dictionaries(st.sampled_from(SWITCHES), st.booleans() | ANYTHING, max_size=3),
    st.dictionaries(st.sampled_from(["max_len", "sentences", "foo"]), ANYTHING, max_size=1),
)


def sentence_of(body):
    try:
        read_request(body)
    except UserError as error:
        return str(error)
    return None


@settings(max_examples=250, deadline=None)
@given(REQUESTS)
@example({"prompts": ["Hello"], "top_k": 3, "top_p": 1})
def test_the_first_broken_rule_is_the_answer(body):
    expected = refusal(body, OURS)
    if expected is None and body.get("random_seed", 0) > LARGEST_SEED:
        assert "random_seed is too large" in sentence_of(body)
    else:
        assert sentence_of(body) == (NOT_TEXTS if expected == FAILS else expected)


@pytest.mark.parametrize("key", [*NUMBERS, *SWITCHES])
def test_null_is_a_wrong_value(key):
    filled = {"prompts": ["Hello"], "top_p": 0.5, key: None}
    assert key in sentence_of(filled) and sentence_of(filled) == refusal(filled, MEGATRON)


@pytest.mark.parametrize("body", [None, 5, "prompts", ["prompts"], True, 1.5, []])
def test_what_is_not_an_object_has_no_prompts(body):
    assert sentence_of(body) == "prompts argument required"


def test_bools_are_not_numbers_and_integers_stand_for_floats():
    for key in ("tokens_to_generate", "random_seed", "beam_width", "stop_token"):
        body = {"prompts": ["Hello"], key: True}
        assert refusal(body, MEGATRON) is None and sentence_of(body).startswith(f"{key} must be")
    api = read_request({"prompts": ["Hello"], "top_p": 1, "top_p_decay": 1, "top_p_bound": 1, "length_penalty": 2})
    assert (api.top_p, api.top_p_decay, api.top_p_bound, api.length_penalty) == (1, 1, 1, 2)


def test_defaults_are_megatrons():
    api = read_request(json.loads('{"prompts": ["Hello"]}'))
    assert (api.tokens_to_generate, api.temperature, api.top_k, api.top_p) == (64, 1.0, 0, 0.0)
    assert (api.beam_width, api.stop_token, api.length_penalty, api.random_seed) == (None, None, 1.0, None)
    assert not any(getattr(api, key) for key in SWITCHES)

"""Options of rules: their values, what a step must be able to do for them, and what of them goes to the device."""

import re

import pytest
import torch

from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.cache import SlotState
from dtgpt.inference.options import Options
from dtgpt.inference.request import variant_of
from dtgpt.inference.rules.options import RuleOptions
from dtgpt.ops.sampling.sequences import MOST_BIASES, MOST_STOPS, NONE, Variant, unpack
from dtgpt.util.errors import UserError

VOCABULARY, POSITIONS = 50, 16
IDS = SpecialIds(ends=(49,), newline=10, double_newline=11, colon=12)


def test_the_options_of_rules_are_options_of_every_prompt():
    assert issubclass(Options, RuleOptions)


@pytest.mark.parametrize("options, sentence", [
    ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens=4 is above max_new_tokens=3; use at most that"),
    ({"min_new_tokens": -1}, "min_new_tokens=-1 is not valid; use a whole number from 0 to 16"),
    ({"top_p_decay": -1}, "top_p_decay=-1 is not valid; use a number from 0 to 1"),
    ({"min_p": 1.01}, "min_p=1.01 is not valid; use a number from 0 to 1"),
    ({"top_p": 0.5, "top_p_bound": 0.6}, "top_p_bound=0.6 is above top_p=0.5; use at most that"),
    ({"frequency_penalty": 2.5}, "frequency_penalty=2.5 is not valid; use a number from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty=0 is not valid; use a number from 0.01 to 100"),
    ({"presence_penalty": -3}, "presence_penalty=-3 is not valid; use a number from -2 to 2"),
    ({"no_repeat_ngram_size": 33}, "no_repeat_ngram_size=33 is not valid; use a whole number from 0 to 32"),
    ({"logit_bias": [1]}, "logit_bias=[1] is not a mapping; map token ids to numbers"),
    ({"logit_bias": {50: 1}}, "a token of logit_bias=50 is not valid; use a whole number from 0 to 49"),
    ({"logit_bias": {"3": 1}}, "a token of logit_bias='3' is not valid; use a whole number from 0 to 49"),
    ({"logit_bias": {3: 101}}, "logit_bias of token 3=101 is not valid; use a number from -100 to 100"),
    ({"logit_bias": dict.fromkeys(range(301), 0)}, "logit_bias has 301 tokens; give 300 at most"),
    ({"stop_on_eol": None}, "stop_on_eol=None is not a switch; use true or false"),
])  # fmt: skip
def test_a_wrong_value_of_a_rule_gets_a_sentence(options, sentence):
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}"):
        Options(**{"max_new_tokens": 9, **options}).validate(VOCABULARY, POSITIONS)


def test_right_values_of_rules_pass():
    Options(
        max_new_tokens=POSITIONS, min_new_tokens=POSITIONS, temperature=0, top_k=2**31 - 1, top_p=1, top_p_decay=1,
        top_p_bound=1, frequency_penalty=-2, presence_penalty=2, logit_bias={0: -100, 49: 0.5},
        no_repeat_ngram_size=32, seed=2**64 - 1, stop_token_ids=(0, 49),
    ).validate(VOCABULARY, POSITIONS)  # fmt: skip


@pytest.mark.parametrize("options, expected", [
    ({"top_p": 0.0, "top_p_decay": 0.5}, Variant()), ({"min_p": 0.1}, Variant(filters=True)),
    ({"top_p": 1.0, "top_p_decay": 0.5}, Variant(filters=True)), ({"min_new_tokens": 1}, Variant(edits=True)),
    ({"logit_bias": {1: 1}}, Variant(edits=True)), ({"presence_penalty": 1}, Variant(edits=True)),
    ({"repetition_penalty": 1.1}, Variant(edits=True)),
    ({"frequency_penalty": 1}, Variant(edits=True)), ({"prevent_newline_after_colon": True}, Variant(edits=True)),
    ({"no_repeat_ngram_size": 1}, Variant(ngram=1)), ({"no_repeat_ngram_size": 3}, Variant(ngram=4)),
    ({"stop_on_eol": True, "stop_token_ids": (3,), "seed": 5}, Variant()),
])  # fmt: skip
def test_the_variant_is_what_the_rules_need(options, expected):
    assert variant_of([Options(), Options(**options)]) == expected


def test_the_variant_of_several_rules_suffices_for_all():
    samplings = [Options(top_k=3), Options(no_repeat_ngram_size=5), Options(min_new_tokens=2)]
    assert variant_of(samplings, alternatives=4) == Variant(True, True, 8, 4)


@pytest.mark.parametrize("options, special, endings, paired", [
    ({}, IDS, [49], NONE), ({"stop_on_eol": True}, IDS, [10, 11], NONE),
    ({"stop_on_eol": True, "stop_token_ids": (3,)}, SpecialIds((49,), 10), [3, 10], NONE),
    ({"stop_on_eol": True, "stop_on_double_eol": True}, IDS, [11], 10),
    ({"stop_on_double_eol": True}, SpecialIds((49,)), [], NONE),
])  # fmt: skip
def test_what_ends_a_sequence_by_rules(options, special, endings, paired):
    payload = SlotState.encode([1, 2], Options(**options), special, 0, 0)
    found = unpack(payload[None, :-2])
    assert [token for token in found.endings[0].tolist() if token != NONE] == endings
    assert int(found.integers.paired_newline) == paired


def test_parameters_of_rules_come_out_as_they_went_in():
    bias = {token: token / 7 for token in range(MOST_BIASES)}
    sampling = Options(
        temperature=1 / 3, top_k=7, top_p=0.1, top_p_decay=0.7, top_p_bound=0.05, min_p=0.02,
        frequency_penalty=-0.3, presence_penalty=0.4, repetition_penalty=1.3, logit_bias=bias,
        no_repeat_ngram_size=3, min_new_tokens=2,
        stop_token_ids=tuple(range(MOST_STOPS)), stop_on_eol=True, prevent_newline_after_colon=True, seed=-1,
    )  # fmt: skip
    payload = SlotState.encode([4, 5, 6], sampling, IDS, 0, 0)
    assert payload.dtype == torch.int64 and payload[-3:].tolist() == [4, 5, 6]
    found = unpack(payload[None, :-3])
    assert [float(x) for x in found.floats] == [1 / 3, 0.1, 0.7, 0.05, 0.02, -0.3, 0.4, 1.3]
    integers = {name: int(value) for name, value in found.integers._asdict().items() if "key" not in name}
    assert list(integers.values()) == [3, 7, 3, 2, 12, 10, NONE]
    assert dict(zip(found.bias_ids[0].tolist(), found.bias_values[0].tolist(), strict=True)) == bias
    assert [end for end in found.endings[0].tolist() if end != NONE] == [*range(MOST_STOPS), 10, 11]

"""What a request may ask of sampling, and the state of sequences in slots."""

import math
import re

import pytest
import torch

from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.cache import SlotState
from dtgpt.inference.options import Options
from dtgpt.inference.request import variant_of
from dtgpt.ops.sampling.sequences import MOST_BIASES, MOST_STOPS, NONE, Variant, unpack
from dtgpt.util.errors import UserError

VOCABULARY, POSITIONS = 50, 16
IDS = SpecialIds(ends=(49,), newline=10, double_newline=11, colon=12)
HUGE = 10**400


@pytest.mark.parametrize("options, sentence", [
    ({"max_new_tokens": 17}, "max_new_tokens=17 is not valid; use a whole number from 0 to 16"),
    ({"max_new_tokens": True}, "max_new_tokens=True is not valid; use a whole number from 0 to 16"),
    ({"max_new_tokens": 2.0}, "max_new_tokens=2.0 is not valid; use a whole number from 0 to 16"),
    ({"max_new_tokens": None}, "max_new_tokens=None is not valid; use a whole number from 0 to 16"),
    ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens=4 is above max_new_tokens=3; use at most that"),
    ({"min_new_tokens": -1}, "min_new_tokens=-1 is not valid; use a whole number from 0 to 16"),
    ({"temperature": -0.5}, "temperature=-0.5 is not valid; use a number from 0 to 100"),
    ({"temperature": math.nan}, "temperature=nan is not valid; use a number from 0 to 100"),
    ({"temperature": math.inf}, "temperature=inf is not valid; use a number from 0 to 100"),
    ({"temperature": HUGE}, "temperature=<integer of 1329 bits> is not valid; use a number from 0 to 100"),
    ({"temperature": "1"}, "temperature='1' is not valid; use a number from 0 to 100"),
    ({"temperature": False}, "temperature=False is not valid; use a number from 0 to 100"),
    ({"top_k": 2.5}, "top_k=2.5 is not valid; use a whole number from 0 to 2147483647"),
    ({"top_p": 1.5}, "top_p=1.5 is not valid; use a number from 0 to 1"),
    ({"top_p_decay": -1}, "top_p_decay=-1 is not valid; use a number from 0 to 1"),
    ({"min_p": 1.01}, "min_p=1.01 is not valid; use a number from 0 to 1"),
    ({"top_p": 0.5, "top_p_bound": 0.6}, "top_p_bound=0.6 is above top_p=0.5; use at most that"),
    ({"frequency_penalty": 2.5}, "frequency_penalty=2.5 is not valid; use a number from -2 to 2"),
    ({"presence_penalty": -3}, "presence_penalty=-3 is not valid; use a number from -2 to 2"),
    ({"no_repeat_ngram_size": 33}, "no_repeat_ngram_size=33 is not valid; use a whole number from 0 to 32"),
    ({"seed": 2**64}, "seed=18446744073709551616 is not valid; use a whole number from"),
    ({"seed": 1.0}, "seed=1.0 is not valid; use a whole number from"),
    ({"logit_bias": [1]}, "logit_bias=[1] is not a mapping; map token ids to numbers"),
    ({"logit_bias": {50: 1}}, "a token of logit_bias=50 is not valid; use a whole number from 0 to 49"),
    ({"logit_bias": {"3": 1}}, "a token of logit_bias='3' is not valid; use a whole number from 0 to 49"),
    ({"logit_bias": {3: 101}}, "logit_bias of token 3=101 is not valid; use a number from -100 to 100"),
    ({"logit_bias": dict.fromkeys(range(301), 0)}, "logit_bias has 301 tokens; give 300 at most"),
    ({"stop_token_ids": 3}, "stop_token_ids=3 is not a list; give a list of token ids"),
    ({"stop_token_ids": (-1,)}, "a token of stop_token_ids=-1 is not valid; use a whole number from 0 to 49"),
    ({"stop_token_ids": (1,) * 65}, "stop_token_ids has 65 tokens; give 64 at most"),
    ({"ends": 1}, "ends=1 is not a switch; use true or false"),
    ({"stop_on_eol": None}, "stop_on_eol=None is not a switch; use true or false"),
])  # fmt: skip
def test_a_wrong_value_gets_a_sentence(options, sentence):
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}"):
        Options(**{"max_new_tokens": 9, **options}).validate(VOCABULARY, POSITIONS)


def test_right_values_pass():
    Options(max_new_tokens=0).validate(VOCABULARY, POSITIONS)
    Options(
        max_new_tokens=POSITIONS, min_new_tokens=POSITIONS, temperature=0, top_k=2**31 - 1, top_p=1, top_p_decay=1,
        top_p_bound=1, frequency_penalty=-2, presence_penalty=2, logit_bias={0: -100, 49: 0.5},
        no_repeat_ngram_size=32, seed=2**64 - 1, stop_token_ids=(0, 49),
    ).validate(VOCABULARY, POSITIONS)  # fmt: skip


@pytest.mark.parametrize("options, expected", [
    ({}, Variant()), ({"temperature": 0, "top_k": 5, "top_p": 0.5}, Variant()),
    ({"temperature": 1e-9, "top_p": 0.5}, Variant()), ({"top_k": 1}, Variant()), ({"top_k": 2}, Variant(filters=True)),
    ({"top_p": 0.0}, Variant()), ({"top_p": 0.0, "top_p_decay": 0.5}, Variant()),
    ({"top_p": 0.9}, Variant(filters=True)), ({"min_p": 0.1}, Variant(filters=True)),
    ({"top_p": 1.0, "top_p_decay": 0.5}, Variant(filters=True)), ({"min_new_tokens": 1}, Variant(edits=True)),
    ({"logit_bias": {1: 1}}, Variant(edits=True)), ({"presence_penalty": 1}, Variant(edits=True)),
    ({"frequency_penalty": 1}, Variant(edits=True)), ({"prevent_newline_after_colon": True}, Variant(edits=True)),
    ({"no_repeat_ngram_size": 1}, Variant(ngram=1)), ({"no_repeat_ngram_size": 3}, Variant(ngram=4)),
    ({"stop_on_eol": True, "stop_token_ids": (3,), "seed": 5}, Variant()),
])  # fmt: skip
def test_the_variant_is_what_the_options_need(options, expected):
    assert variant_of([Options(), Options(**options)]) == expected


def test_the_variant_of_several_is_what_suffices_for_all():
    samplings = [Options(top_k=3), Options(no_repeat_ngram_size=5), Options(min_new_tokens=2)]
    assert variant_of(samplings, alternatives=4) == Variant(True, True, 8, 4)
    assert variant_of([]) == Variant()


@pytest.mark.parametrize("options, special, endings, paired", [
    ({}, IDS, [49], NONE), ({}, SpecialIds(), [], NONE), ({"ends": False}, IDS, [], NONE),
    ({"stop_token_ids": (3, 4)}, IDS, [3, 4, 49], NONE), ({"stop_on_eol": True}, IDS, [10, 11], NONE),
    ({"stop_on_eol": True, "stop_token_ids": (3,)}, SpecialIds((49,), 10), [3, 10], NONE),
    ({"stop_on_eol": True, "stop_on_double_eol": True}, IDS, [11], 10),
    ({"stop_on_double_eol": True}, SpecialIds((49,)), [], NONE),
])  # fmt: skip
def test_what_ends_a_sequence(options, special, endings, paired):
    payload = SlotState.encode([1, 2], Options(**options), special, 0, 0)
    found = unpack(payload[None, :-2])
    assert [token for token in found.endings[0].tolist() if token != NONE] == endings
    assert int(found.integers.paired_newline) == paired


def test_parameters_come_out_as_they_went_in():
    bias = {token: token / 7 for token in range(MOST_BIASES)}
    sampling = Options(
        temperature=1 / 3, top_k=7, top_p=0.1, top_p_decay=0.7, top_p_bound=0.05, min_p=0.02,
        frequency_penalty=-0.3, presence_penalty=0.4, logit_bias=bias, no_repeat_ngram_size=3, min_new_tokens=2,
        stop_token_ids=tuple(range(MOST_STOPS)), stop_on_eol=True, prevent_newline_after_colon=True, seed=-1,
    )  # fmt: skip
    payload = SlotState.encode([4, 5, 6], sampling, IDS, 0, 0)
    assert payload.dtype == torch.int64 and payload[-3:].tolist() == [4, 5, 6]
    found = unpack(payload[None, :-3])
    assert [float(x) for x in found.floats] == [1 / 3, 0.1, 0.7, 0.05, 0.02, -0.3, 0.4]
    integers = {name: int(value) for name, value in found.integers._asdict().items() if "key" not in name}
    assert list(integers.values()) == [3, 7, 3, 2, 12, 10, NONE]
    assert dict(zip(found.bias_ids[0].tolist(), found.bias_values[0].tolist(), strict=True)) == bias
    assert [end for end in found.endings[0].tolist() if end != NONE] == [*range(MOST_STOPS), 10, 11]


def test_keys_differ_between_seeds_prompts_and_choices():
    def key(seed: int, prompt: int, choice: int) -> tuple:
        return tuple(SlotState.encode([1], Options(seed=seed), IDS, prompt, choice)[1:3].tolist())

    assert len({key(seed, prompt, choice) for seed in (0, 1, -1) for prompt in range(3) for choice in range(3)}) == 27


def test_steps_are_recorded():
    state = SlotState(3, POSITIONS, "cpu")
    state.set(0, SlotState.encode([1, 2, 3], Options(), IDS, 0, 0))
    state.set(2, SlotState.encode([4], Options(), IDS, 1, 0))
    assert state.token.tolist() == [3, 0, 4, 0] and state.position.tolist() == [2, 0, 0, 0]
    slots = torch.tensor([2, 0, 3, 3])
    state.record(slots, torch.tensor([20, 21, 9, 9]))
    state.record(slots, torch.tensor([22, 23, 9, 9]))
    assert state.history[0, :5].tolist() == [1, 2, 3, 21, 23] and state.history[2, :3].tolist() == [4, 20, 22]
    assert state.token[[0, 2]].tolist() == [23, 22] and state.position[[0, 2]].tolist() == [4, 2]
    assert not state.history[1].any() and not state.token[1]


def test_at_the_last_position_nothing_moves():
    state = SlotState(1, POSITIONS, "cpu")
    state.set(0, SlotState.encode([1] * (POSITIONS - 1), Options(), IDS, 0, 0))
    for token in (5, 6, 7):
        state.record(torch.tensor([0]), torch.tensor([token]))
    assert state.position[0] == POSITIONS - 1 and state.history[0].tolist() == [1] * (POSITIONS - 1) + [7]


def test_slots_are_copied_at_once_and_tokens_assigned():
    state = SlotState(3, POSITIONS, "cpu")
    for slot in range(3):
        state.set(slot, SlotState.encode([slot] * (slot + 1), Options(top_k=slot + 2), IDS, 0, 0))
    state.record(torch.arange(3), torch.tensor([30, 31, 32]))
    before = [tensor.clone() for tensor in state.sequences]
    state.copy(torch.tensor([1, 0, 0]), torch.tensor([0, 1, 2]))
    for old, new in zip(before, state.sequences, strict=True):
        assert torch.equal(new[:3], old[[1, 0, 0]]) and torch.equal(new[3], old[3])
    state.assign([2, 0], [40, 41])
    assert state.token[:3].tolist() == [41, 30, 40]
    assert state.history[2, :2].tolist() == [0, 40] and state.history[0, :3].tolist() == [1, 1, 41]

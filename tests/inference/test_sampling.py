"""What a request may ask of sampling, and the state of sequences in slots."""

import math
import re

import pytest
import torch

from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.cache import SlotState
from dtgpt.inference.options import Options
from dtgpt.inference.request import variant_of
from dtgpt.ops.sampling.sequences import MOST_STOPS, NONE, Variant, unpack
from dtgpt.util.errors import UserError

VOCABULARY, POSITIONS = 50, 16
IDS = SpecialIds(ends=(49,), newline=10, double_newline=11, colon=12)
HUGE = 10**400


@pytest.mark.parametrize("options, sentence", [
    ({"max_new_tokens": 17}, "max_new_tokens=17 is not valid; use a whole number from 0 to 16"),
    ({"max_new_tokens": True}, "max_new_tokens=True is not valid; use a whole number from 0 to 16"),
    ({"max_new_tokens": 2.0}, "max_new_tokens=2.0 is not valid; use a whole number from 0 to 16"),
    ({"max_new_tokens": None}, "max_new_tokens=None is not valid; use a whole number from 0 to 16"),
    ({"temperature": -0.5}, "temperature=-0.5 is not valid; use a number from 0 to 100"),
    ({"temperature": math.nan}, "temperature=nan is not valid; use a number from 0 to 100"),
    ({"temperature": math.inf}, "temperature=inf is not valid; use a number from 0 to 100"),
    ({"temperature": HUGE}, "temperature=<integer of 1329 bits> is not valid; use a number from 0 to 100"),
    ({"temperature": "1"}, "temperature='1' is not valid; use a number from 0 to 100"),
    ({"temperature": False}, "temperature=False is not valid; use a number from 0 to 100"),
    ({"top_k": 2.5}, "top_k=2.5 is not valid; use a whole number from 0 to 2147483647"),
    ({"top_p": 1.5}, "top_p=1.5 is not valid; use a number from 0 to 1"),
    ({"seed": 2**64}, "seed=18446744073709551616 is not valid; use a whole number from"),
    ({"seed": 1.0}, "seed=1.0 is not valid; use a whole number from"),
    ({"stop_token_ids": 3}, "stop_token_ids=3 is not a list; give a list of token ids"),
    ({"stop_token_ids": (-1,)}, "a token of stop_token_ids=-1 is not valid; use a whole number from 0 to 49"),
    ({"stop_token_ids": (1,) * 65}, "stop_token_ids has 65 tokens; give 64 at most"),
    ({"ends": 1}, "ends=1 is not a switch; use true or false"),
])  # fmt: skip
def test_a_wrong_value_gets_a_sentence(options, sentence):
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}"):
        Options(**{"max_new_tokens": 9, **options}).validate(VOCABULARY, POSITIONS)


def test_right_values_pass():
    Options(max_new_tokens=0).validate(VOCABULARY, POSITIONS)
    Options(
        max_new_tokens=POSITIONS, temperature=0, top_k=2**31 - 1, top_p=1, seed=2**64 - 1, stop_token_ids=(0, 49),
    ).validate(VOCABULARY, POSITIONS)  # fmt: skip


@pytest.mark.parametrize("options, expected", [
    ({}, Variant()), ({"temperature": 0, "top_k": 5, "top_p": 0.5}, Variant()),
    ({"temperature": 1e-9, "top_p": 0.5}, Variant()), ({"top_k": 1}, Variant()), ({"top_k": 2}, Variant(filters=True)),
    ({"top_p": 0.0}, Variant()), ({"top_p": 0.9}, Variant(filters=True)),
    ({"stop_token_ids": (3,), "seed": 5}, Variant()),
])  # fmt: skip
def test_the_variant_is_what_the_options_need(options, expected):
    assert variant_of([Options(), Options(**options)]) == expected


def test_the_variant_of_several_is_what_suffices_for_all():
    assert variant_of([Options(top_k=3), Options()], alternatives=4) == Variant(filters=True, alternatives=4)
    assert variant_of([]) == Variant()


@pytest.mark.parametrize("options, special, endings", [
    ({}, IDS, [49]), ({}, SpecialIds(), []), ({"ends": False}, IDS, []), ({"stop_token_ids": (3, 4)}, IDS, [3, 4, 49]),
])  # fmt: skip
def test_what_ends_a_sequence(options, special, endings):
    payload = SlotState.encode([1, 2], Options(**options), special, 0, 0)
    assert [token for token in unpack(payload[None, :-2]).endings[0].tolist() if token != NONE] == endings


def test_parameters_come_out_as_they_went_in():
    sampling = Options(temperature=1 / 3, top_k=7, top_p=0.1, stop_token_ids=tuple(range(MOST_STOPS)), seed=-1)
    payload = SlotState.encode([4, 5, 6], sampling, IDS, 0, 0)
    assert payload.dtype == torch.int64 and payload[-3:].tolist() == [4, 5, 6]
    found = unpack(payload[None, :-3])
    assert [float(x) for x in found.floats] == [1 / 3, 0.1, 0, 0, 0, 0, 0, 0]
    integers = {name: int(value) for name, value in found.integers._asdict().items() if "key" not in name}
    assert list(integers.values()) == [3, 7, 0, 0, NONE, NONE, NONE]
    assert not found.bias_ids.any() and not found.bias_values.any()
    assert [end for end in found.endings[0].tolist() if end != NONE] == [*range(MOST_STOPS), 49]


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


def test_slots_are_copied_at_once():
    state = SlotState(3, POSITIONS, "cpu")
    for slot in range(3):
        state.set(slot, SlotState.encode([slot] * (slot + 1), Options(top_k=slot + 2), IDS, 0, 0))
    state.record(torch.arange(3), torch.tensor([30, 31, 32]))
    before = [tensor.clone() for tensor in state.sequences]
    state.copy(torch.tensor([1, 0, 0]), torch.tensor([0, 1, 2]))
    for old, new in zip(before, state.sequences, strict=True):
        assert torch.equal(new[:3], old[[1, 0, 0]]) and torch.equal(new[3], old[3])

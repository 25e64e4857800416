"""What a request may ask of sampling, its checks, and how it becomes the parameters of a sequence on the device."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from dtgpt.ops.random.philox import fold_words
from dtgpt.ops.sampling.sequences import (
    MOST_BIASES,
    MOST_NGRAM,
    MOST_STOPS,
    NONE,
    Floats,
    Integers,
    Variant,
    pack,
)
from dtgpt.util.errors import UserError, shown

HIGHEST_TEMPERATURE = 100.0  # as Megatron-LM's server
GREEDY_BELOW = 1e-4  # a lower temperature takes the likeliest token: quotients by it would leave fp32
LARGEST_TOP_K = 2**31 - 1
BIAS, PENALTY = 100.0, 2.0  # largest absolute values, as OpenAI's API


class SpecialIds(NamedTuple):
    """Ids that rules need, looked up in the tokenizer; None where it has no such token."""

    end_of_text: int | None = None
    newline: int | None = None  # "\n"
    double_newline: int | None = None  # "\n\n"
    colon: int | None = None  # ":"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a sequence goes on and where it ends."""

    max_new_tokens: int = 64
    min_new_tokens: int = 0  # what would end the sequence is banned before
    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 0  # number of likeliest tokens to choose from; 0: all
    top_p: float = 1.0  # choose from the likeliest tokens up to this sum of probabilities; 0 or 1: from all
    top_p_decay: float = 0.0  # factor of top_p at each new token; 0: none
    top_p_bound: float = 0.0  # top_p does not decay below
    frequency_penalty: float = 0.0  # subtracted from a logit for each time that the token was generated
    presence_penalty: float = 0.0  # subtracted from a logit if the token was generated
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    no_repeat_ngram_size: int = 0  # tokens in an n-gram that must not come twice, prompt included; 0: no rule
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ends: bool = True  # the end of text ends the sequence
    stop_on_eol: bool = False  # a newline, single or double, ends it, and the end of text does not
    stop_on_double_eol: bool = False  # a double newline, or two newlines, end it, and the end of text does not
    prevent_newline_after_colon: bool = False

    def validate(self, vocab_size: int, positions: int) -> None:
        """Raise UserError for a value that a model of these sizes cannot work with."""
        _check_whole("max_new_tokens", self.max_new_tokens, 0, positions)
        _check_whole("min_new_tokens", self.min_new_tokens, 0, positions)
        if self.min_new_tokens > self.max_new_tokens:
            raise UserError(
                f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}; use at most that"
            )
        _check_number("temperature", self.temperature, 0, HIGHEST_TEMPERATURE)
        _check_whole("top_k", self.top_k, 0, LARGEST_TOP_K)
        for name in ("top_p", "top_p_decay", "top_p_bound"):
            _check_number(name, getattr(self, name), 0, 1)
        if self.top_p_bound > self.top_p:
            raise UserError(f"top_p_bound={self.top_p_bound} is above top_p={self.top_p}; use at most that")
        for name in ("frequency_penalty", "presence_penalty"):
            _check_number(name, getattr(self, name), -PENALTY, PENALTY)
        _check_whole("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, MOST_NGRAM)
        _check_whole("seed", self.seed, -(2**63), 2**64 - 1)
        _check_bias(self.logit_bias, vocab_size)
        _check_stops(self.stop_token_ids, vocab_size)
        for name in ("ends", "stop_on_eol", "stop_on_double_eol", "prevent_newline_after_colon"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={shown(getattr(self, name))} is not a switch; use true or false")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def filters(self) -> bool:
        """Whether draws are from fewer tokens than all."""
        top_p = self.top_p > 0 and (self.top_p < 1 or 0 < self.top_p_decay < 1)
        return not self.greedy and (self.top_k > 0 or top_p)

    @property
    def edits(self) -> bool:
        """Whether a rule other than that of n-grams changes logits."""
        values = (self.frequency_penalty, self.presence_penalty, self.logit_bias, self.min_new_tokens)
        return self.prevent_newline_after_colon or any(values)


def variant_of(samplings: Iterable[Sampling], alternatives: int = 0) -> Variant:
    """Return what a step must be able to do for these sequences."""
    found = list(samplings)
    longest = max((s.no_repeat_ngram_size for s in found), default=0)
    return Variant(
        filters=any(s.filters for s in found),
        edits=any(s.edits for s in found),
        ngram=1 << (longest - 1).bit_length() if longest else 0,
        alternatives=alternatives,
    )


def parameters_of(sampling: Sampling, special: SpecialIds, prompt: int, prompt_index: int, choice: int) -> Tensor:
    """Return a row of parameters for `dtgpt.ops.sampling`, int64 on the CPU.

    prompt: number of ids of the prompt. The draws of a sequence belong to (seed, prompt_index, choice).
    """
    key_0, key_1 = fold_words(sampling.seed, "text", prompt_index, choice)
    colon, newline = special.colon, special.newline
    if not sampling.prevent_newline_after_colon or colon is None or newline is None:
        colon, newline = NONE, NONE
    paired = special.newline if sampling.stop_on_double_eol else None
    integers = Integers(
        prompt_length=prompt,
        key_0=key_0,
        key_1=key_1,
        top_k=sampling.top_k,
        ngram=sampling.no_repeat_ngram_size,
        min_new_tokens=sampling.min_new_tokens,
        colon=colon,
        newline=newline,
        paired_newline=NONE if paired is None else paired,
    )
    floats = Floats(
        temperature=0.0 if sampling.temperature < GREEDY_BELOW else sampling.temperature,
        top_p=sampling.top_p,
        top_p_decay=sampling.top_p_decay,
        top_p_bound=sampling.top_p_bound,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
    )
    return pack(integers, floats, sampling.logit_bias, endings_of(sampling, special))


def endings_of(sampling: Sampling, special: SpecialIds) -> list[int]:
    """Return the ids that end a sequence whatever comes before them (Megatron-LM's rules for ends of lines)."""
    if sampling.stop_on_double_eol:
        rule = [special.double_newline]
    elif sampling.stop_on_eol:
        rule = [special.newline, special.double_newline]
    else:
        rule = [special.end_of_text] if sampling.ends else []
    return [*sampling.stop_token_ids, *(token for token in rule if token is not None)]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _check_whole(name: str, value: Any, least: int, most: int) -> None:
    if not _is_whole(value) or not least <= value <= most:
        raise UserError(f"{name}={shown(value)} is not valid; use a whole number from {least} to {most}")


def _check_number(name: str, value: Any, least: float, most: float) -> None:
    if not _is_number(value) or not least <= value <= most:
        raise UserError(f"{name}={shown(value)} is not valid; use a number from {least:g} to {most:g}")


def _check_bias(bias: Any, vocab_size: int) -> None:
    if not isinstance(bias, Mapping):
        raise UserError(f"logit_bias={shown(bias)} is not a mapping; map token ids to numbers")
    if len(bias) > MOST_BIASES:
        raise UserError(f"logit_bias has {len(bias)} tokens; give {MOST_BIASES} at most")
    for token, value in bias.items():
        _check_whole("a token of logit_bias", token, 0, vocab_size - 1)
        _check_number(f"logit_bias of token {token}", value, -BIAS, BIAS)


def _check_stops(stops: Any, vocab_size: int) -> None:
    if not isinstance(stops, tuple | list):
        raise UserError(f"stop_token_ids={shown(stops)} is not a list; give a list of token ids")
    if len(stops) > MOST_STOPS:
        raise UserError(f"stop_token_ids has {len(stops)} tokens; give {MOST_STOPS} at most")
    for token in stops:
        _check_whole("a token of stop_token_ids", token, 0, vocab_size - 1)

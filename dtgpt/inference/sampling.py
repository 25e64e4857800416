"""The options of a sequence: their one declaration, their checks, and the parameters that they become on the device."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from torch import Tensor

from dtgpt.inference.text import check_stop_strings
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
from dtgpt.util.field_types import Bounds

GREEDY_BELOW = 1e-4  # a lower temperature takes the likeliest token: quotients by it would leave fp32
LARGEST = 2**31 - 1
MOST_SEQUENCES = 128  # of a prompt
BIAS = 100  # largest absolute value, as in OpenAI's API
FRACTION, PENALTY = Bounds(0, 1), Bounds(-2, 2)


class SpecialIds(NamedTuple):
    """Ids that rules need: those at which texts end, and tokens of the tokenizer; None where it has no such token."""

    ends: tuple[int, ...] = ()
    newline: int | None = None  # "\n"
    double_newline: int | None = None  # "\n\n"
    colon: int | None = None  # ":"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a sequence goes on and where it ends."""

    max_new_tokens: Annotated[
        int,
        "largest number of tokens to add; lower by default where the model has fewer positions left",
        Bounds(0, LARGEST),
    ] = 64
    min_new_tokens: Annotated[
        int,
        "smallest number of tokens to add: tokens that end it cannot come before, stop strings do not count",
        Bounds(0, LARGEST),
    ] = 0
    temperature: Annotated[float, "sampling temperature; 0: always the likeliest token", Bounds(0, 100)] = 1.0
    top_k: Annotated[
        int,
        "choose from the k likeliest tokens, and those as likely as the last of them; 0: from all",
        Bounds(0, LARGEST),
    ] = 0
    top_p: Annotated[
        float,
        "choose from the likeliest tokens, up to the one with which their probabilities exceed p; 1: from all",
        FRACTION,
    ] = 1.0
    top_p_decay: Annotated[float, "the t-th new token, from 0, has top_p x decay^t; 0: no decay", FRACTION] = 0.0
    top_p_bound: Annotated[float, "top_p does not decay below this", FRACTION] = 0.0
    min_p: Annotated[
        float, "choose from the tokens that are at least min_p times as likely as the likeliest; 0: from all", FRACTION
    ] = 0.0
    frequency_penalty: Annotated[float, "taken from a logit for each time that its token was generated", PENALTY] = 0.0
    presence_penalty: Annotated[float, "taken from a logit if its token was generated", PENALTY] = 0.0
    logit_bias: Annotated[Mapping[int, float], "numbers to add to the logits of up to 300 ids"] = field(
        default_factory=dict
    )
    no_repeat_ngram_size: Annotated[
        int, "no sequence of n tokens comes twice, prompt included; 0: any may", Bounds(0, MOST_NGRAM)
    ] = 0
    prevent_newline_after_colon: Annotated[bool, "no newline is drawn after a colon (Megatron-LM)"] = False
    seed: Annotated[int, "seed of the draws: the same seed gives the same text", Bounds(-(2**63), 2**64 - 1)] = 0
    stop_token_ids: Annotated[tuple[int, ...], "ids of tokens that end a text"] = ()
    ends: Annotated[bool, "end a text at the model's ends of text"] = True
    stop_on_eol: Annotated[bool, "end a text after its first line, and not at the end of text (Megatron-LM)"] = False
    stop_on_double_eol: Annotated[bool, "end a text after an empty line, and not at the end of text (Megatron-LM)"] = (
        False
    )

    def validate(self, vocab_size: int, positions: int) -> None:
        """Raise UserError for a value that a model of these sizes cannot work with."""
        kind: Any = type(self)
        for option in declared(kind).values():
            option.check(getattr(self, option.name), vocab_size, positions)
        for name, most in (("min_new_tokens", "max_new_tokens"), ("top_p_bound", "top_p")):
            if getattr(self, name) > getattr(self, most):
                rule = f"is above {most}={getattr(self, most)}; use at most that"
                raise UserError(f"{name}={getattr(self, name)} {rule}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def filters(self) -> bool:
        """Whether draws are from fewer tokens than all."""
        top_p = self.top_p > 0 and (self.top_p < 1 or 0 < self.top_p_decay < 1)
        return not self.greedy and (self.top_k > 0 or top_p or self.min_p > 0)

    @property
    def edits(self) -> bool:
        """Whether a rule other than that of n-grams changes logits."""
        values = (self.frequency_penalty, self.presence_penalty, self.logit_bias, self.min_new_tokens)
        return self.prevent_newline_after_colon or any(values)


class Option(NamedTuple):
    """A declared field of `Sampling` or of a class derived from it."""

    name: str
    kind: Any  # bool, int, float, or a tuple or Mapping of these
    help: str
    least: float
    most: float
    default: Any

    def check(self, value: Any, vocab_size: int = LARGEST, positions: int = LARGEST, name: str = "") -> None:
        """Raise UserError for a value that a model of these sizes cannot work with. `name`: of the option for the user,
        where it is not that of the field."""
        name = name or self.name
        if self.kind is bool:
            check_switches(**{name: value})
        elif self.kind is int:
            sizes = {"max_new_tokens": positions, "min_new_tokens": positions, "top_logprobs": vocab_size}
            check_whole(name, value, self.least, min(self.most, sizes.get(self.name, self.most)))
        elif self.kind is float:
            check_number(name, value, self.least, self.most)
        elif get_origin(self.kind) is Mapping:
            _check_bias(name, value, vocab_size)
        elif get_args(self.kind)[0] is int:
            _check_ids(name, value, vocab_size)
        elif not isinstance(value, tuple):
            raise UserError(f"{name}={shown(value)} is not a text or a list of texts; give one")
        else:
            check_stop_strings(value)


def check_switches(**values: Any) -> None:
    """Raise UserError for a value that is neither true nor false: a text such as "off" would be taken for true."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise UserError(f"{name}={shown(value)} is not a switch; use true or false")


@cache
def declared(kind: Any) -> dict[str, Option]:
    """Return the declared options of a dataclass, by name."""
    hints, found = get_type_hints(kind, include_extras=True), {}
    for one in fields(kind):
        if get_origin(hints[one.name]) is Annotated:
            type_, text, *bounds = get_args(hints[one.name])
            limits = bounds[0] if bounds else Bounds()
            least, most = (math.nan if limit is None else limit for limit in (limits.at_least, limits.at_most))
            default = {} if get_origin(type_) is Mapping else one.default
            found[one.name] = Option(one.name, type_, text, least, most, default)
    return found


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


def key_of(sampling: Sampling, prompt_index: int, choice: int) -> tuple[int, int]:
    """Return the two words of the key of a sequence's draws."""
    return fold_words(sampling.seed, "text", prompt_index, choice)


def parameters_of(sampling: Sampling, special: SpecialIds, prompt: int, prompt_index: int, choice: int) -> Tensor:
    """Return a row of parameters for `dtgpt.ops.sampling`, int64 on the CPU.

    prompt: number of ids of the prompt. The draws of a sequence belong to (seed, prompt_index, choice).
    """
    key_0, key_1 = key_of(sampling, prompt_index, choice)
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
    values = {name: getattr(sampling, name) for name in Floats._fields}
    if sampling.temperature < GREEDY_BELOW:
        values["temperature"] = 0.0
    return pack(integers, Floats(**values), sampling.logit_bias, endings_of(sampling, special))


def endings_of(sampling: Sampling, special: SpecialIds) -> list[int]:
    """Return the ids that end a sequence whatever comes before them (Megatron-LM's rules for ends of lines)."""
    if sampling.stop_on_double_eol:
        rule = [special.double_newline]
    elif sampling.stop_on_eol:
        rule = [special.newline, special.double_newline]
    else:
        rule = [*special.ends] if sampling.ends else []
    return [*sampling.stop_token_ids, *(token for token in rule if token is not None)]


def check_whole(name: str, value: Any, least: float, most: float) -> None:
    """Raise UserError for what is not a whole number within bounds. True and False are not numbers."""
    if type(value) is not int or not least <= value <= most:
        raise UserError(f"{name}={shown(value)} is not valid; use a whole number from {least} to {most}")


def check_number(name: str, value: Any, least: float, most: float) -> None:
    """Raise UserError for what is not a number within bounds. A whole number stands for a float."""
    if type(value) not in (int, float) or not least <= value <= most:
        raise UserError(f"{name}={shown(value)} is not valid; use a number from {least:g} to {most:g}")


def _check_bias(name: str, bias: Any, vocab_size: int) -> None:
    if not isinstance(bias, Mapping):
        raise UserError(f"{name}={shown(bias)} is not a mapping; map token ids to numbers")
    if len(bias) > MOST_BIASES:
        raise UserError(f"{name} has {len(bias)} tokens; give {MOST_BIASES} at most")
    for token, value in bias.items():
        check_whole(f"a token of {name}", token, 0, vocab_size - 1)
        check_number(f"{name} of token {token}", value, -BIAS, BIAS)


def _check_ids(name: str, ids: Any, vocab_size: int) -> None:
    if not isinstance(ids, tuple | list):
        raise UserError(f"{name}={shown(ids)} is not a list; give a list of token ids")
    if len(ids) > MOST_STOPS:
        raise UserError(f"{name} has {len(ids)} tokens; give {MOST_STOPS} at most")
    for token in ids:
        check_whole(f"a token of {name}", token, 0, vocab_size - 1)

"""What options become on the device: the parameters of a sequence, and what a step must be able to do for it."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from dtgpt.inference.options import GREEDY_BELOW, Options
from dtgpt.ops.random.philox import fold_words
from dtgpt.ops.sampling.sequences import NONE, Floats, Integers, Variant, pack


class SpecialIds(NamedTuple):
    """Ids that rules need: those at which texts end, and tokens of the tokenizer; None where it has no such token."""

    ends: tuple[int, ...] = ()
    newline: int | None = None  # "\n"
    double_newline: int | None = None  # "\n\n"
    colon: int | None = None  # ":"


def variant_of(samplings: Iterable[Options], alternatives: int = 0) -> Variant:
    """Return what a step must be able to do for these sequences."""
    found = list(samplings)
    longest = max((s.no_repeat_ngram_size for s in found), default=0)
    return Variant(
        filters=any(s.filters for s in found),
        edits=any(s.edits for s in found),
        ngram=1 << (longest - 1).bit_length() if longest else 0,
        alternatives=alternatives,
    )


def key_of(sampling: Options, prompt_index: int, choice: int) -> tuple[int, int]:
    """Return the two words of the key of a sequence's draws."""
    return fold_words(sampling.seed, "text", prompt_index, choice)


def parameters_of(sampling: Options, special: SpecialIds, prompt: int, prompt_index: int, choice: int) -> Tensor:
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


def endings_of(sampling: Options, special: SpecialIds) -> list[int]:
    """Return the ids that end a sequence whatever comes before them (Megatron-LM's rules for ends of lines)."""
    if sampling.stop_on_double_eol:
        rule = [special.double_newline]
    elif sampling.stop_on_eol:
        rule = [special.newline, special.double_newline]
    else:
        rule = [*special.ends] if sampling.ends else []
    return [*sampling.stop_token_ids, *(token for token in rule if token is not None)]

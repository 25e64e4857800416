"""What a prompt may be continued with: every option of `Model.generate` and `dtgpt generate`, with its checks."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from dtgpt.inference.sampling import Sampling
from dtgpt.inference.text import check_stop_strings
from dtgpt.models.config import ModelConfig
from dtgpt.util.errors import UserError, shown, shown_name

NEW_TOKENS = 64  # where nothing is said of it
LONGEST_ID = 20  # digits
MOST_SEQUENCES, MOST_ALTERNATIVES = 128, 20
ELSEWHERE = {  # names that other programs have for an option
    "max_length": "max_new_tokens", "max_tokens": "max_new_tokens", "new_tokens": "max_new_tokens",
    "tokens": "max_new_tokens", "tokens_to_generate": "max_new_tokens", "min_length": "min_new_tokens",
    "min_tokens": "min_new_tokens", "n": "num_return_sequences", "best_of": "num_return_sequences",
    "num_samples": "num_return_sequences", "beam_width": "num_beams", "stop": "stop_strings",
    "eos_token_id": "stop_token_ids", "stop_token": "stop_token_ids", "random_seed": "seed", "generator": "seed",
    "repetition_penalty": "frequency_penalty", "logprobs": "top_logprobs", "ignore_eos": "ends",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options(Sampling):
    """The options of a prompt: those of `Sampling`, and those of several sequences, of text and of what is returned."""

    do_sample: bool = True  # False: always the likeliest token
    num_return_sequences: int = 1  # continuations of the prompt; of beams, the best ones
    num_beams: int = 1  # above 1: beam search, in which nothing is drawn
    length_penalty: float = 1.0  # a beam scores the sum of its log-probabilities / length ** length_penalty
    early_stopping: bool = False  # whether a beam search ends as soon as `num_beams` sequences have ended
    stop_strings: tuple[str, ...] = ()  # the text ends before the first of them
    top_logprobs: int = 0  # likeliest tokens to return with their log-probabilities, at each new token
    prompt_logprobs: bool = False  # return the log-probabilities of the prompt's tokens

    def check_extra(self, vocab_size: int) -> None:
        """Raise UserError for a wrong value of the options that `Sampling` does not have."""
        for name, least, most in (
            ("num_return_sequences", 1, MOST_SEQUENCES), ("num_beams", 1, MOST_SEQUENCES),
            ("top_logprobs", 0, min(MOST_ALTERNATIVES, vocab_size)),
        ):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise UserError(f"{name}={shown(value)} is not valid; use a whole number from {least} to {most}")
        if type(self.length_penalty) not in (int, float):
            raise UserError(f"length_penalty={shown(self.length_penalty)} is not a number; use one, such as 1.0")
        for name in ("do_sample", "early_stopping", "prompt_logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={shown(getattr(self, name))} is not a switch; use true or false")
        if not isinstance(self.stop_strings, tuple):
            raise UserError(f"stop_strings={shown(self.stop_strings)} is not a text or a list of texts; give one")
        check_stop_strings(self.stop_strings)
        for name in ("stop_strings", "stop_on_eol", "stop_on_double_eol", "top_logprobs"):
            if self.num_beams > 1 and getattr(self, name):
                raise UserError(f"a beam search does not take {name}; leave it out, or use num_beams=1")


NAMES = tuple(field.name for field in fields(Options))


def read_options(given: Mapping[str, Any], prompt_length: int, config: ModelConfig, most: int = NEW_TOKENS) -> Options:
    """Return the options `given` by name, None where one is left out, for a prompt of `prompt_length` tokens. Without
    `max_new_tokens`, there are `most` or as many as the positions of the model leave.

    Raise UserError for a name or a value that does not exist; values of `Sampling` are left to `Request.validate`.
    """
    for name in given:
        if name not in NAMES:
            raise UserError(f"there is no option {shown_name(name)}; {advice(name)}")
    known = {name: _plain(name, value) for name, value in given.items() if value is not None}
    known.setdefault("max_new_tokens", max(1, min(most, config.seq_length - prompt_length)))
    options = Options(**known)
    options.check_extra(config.vocab_size)
    return options if options.do_sample else replace(options, temperature=0.0)


def advice(name: str, known: tuple[str, ...] = NAMES) -> str:
    """Return what a user may have meant by a name that is not one of `known`."""
    elsewhere = ELSEWHERE.get(name)
    near = elsewhere if elsewhere in known else next(iter(difflib.get_close_matches(str(name)[:99], known, n=1)), None)
    return f"did you mean {near}?" if near else f"use one of {', '.join(known)}"


def _plain(name: str, value: Any) -> Any:
    """Return a value in the type of its field: lists of texts and ids, and keys of ids, come in several."""
    if name == "stop_strings":
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    if name == "stop_token_ids":
        return (value,) if isinstance(value, int) else tuple(value) if isinstance(value, list) else value
    if name == "logit_bias" and isinstance(value, Mapping):
        return {int(key) if spells_id(key) else key: bias for key, bias in value.items()}
    return value


def spells_id(key: Any) -> bool:
    """Return whether a key, which JSON has as a text, may be an id."""
    return isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < LONGEST_ID

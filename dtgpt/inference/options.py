"""What a prompt may be continued with: every option of `Model.generate` and `dtgpt generate`, by name.

One class has all of them, made of the core's and the capabilities' when this file is imported. Whoever takes an option
by name looks it up here, so that a wrong name, also one of another library, gets the same sentence everywhere.

They are those of `BaseOptions`, and what capabilities add to them.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtgpt.inference.base_options import BaseOptions, declared
from dtgpt.models.config import ModelConfig
from dtgpt.util import seams
from dtgpt.util.errors import UserError, shown_name

NEW_TOKENS = 64  # where nothing is said of it
INITIAL: dict[str, Any] = {
    "max_new_tokens": 200,
    "temperature": 0.8,
    "top_k": 50,
}  # where a person asks: on a terminal or a page
ELSEWHERE = {  # names that other programs have for an option
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "new_tokens": "max_new_tokens",
    "tokens": "max_new_tokens",
    "tokens_to_generate": "max_new_tokens",
    "min_length": "min_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
    "best_of": "num_return_sequences",
    "num_samples": "num_return_sequences",
    "beam_width": "num_beams",
    "stop": "stop_strings",
    "eos_token_id": "stop_token_ids",
    "stop_token": "stop_token_ids",
    "random_seed": "seed",
    "generator": "seed",
    "logprobs": "top_logprobs",
    "ignore_eos": "ends",
}
_MoreOptions: Any = type("_MoreOptions", (*seams.listed("options"), BaseOptions), {})


@dataclass(frozen=True, kw_only=True)
class Options(_MoreOptions, BaseOptions):
    """How sequences go on from a prompt, where they end, and what is returned of them."""


OPTIONS = declared(Options)
NAMES = tuple(OPTIONS)


def read_options(given: Mapping[str, Any], prompt_length: int, config: ModelConfig, most: int = NEW_TOKENS) -> Options:
    """Return the options `given` by name, None where one is left out, for a prompt of `prompt_length` tokens. Without
    `max_new_tokens`, there are `most` or as many as the positions of the model leave.

    Raise UserError for a name or a value that does not exist.
    """
    for name in given:
        if name not in NAMES:
            raise UserError(f"there is no option {shown_name(name)}; {advice(name, NAMES)}")
    known = {name: OPTIONS[name].read(value) for name, value in given.items() if value is not None}
    known.setdefault("max_new_tokens", max(1, min(most, config.seq_length - prompt_length)))
    options = Options(**known)
    options.validate(config.vocab_size, config.seq_length)
    return options.settled()


def advice(name: str, known: tuple[str, ...]) -> str:
    """Return what a user may have meant by a name that is not one of `known`."""
    elsewhere = ELSEWHERE.get(name)
    near = elsewhere if elsewhere in known else next(iter(difflib.get_close_matches(str(name)[:99], known, n=1)), None)
    return f"did you mean {near}?" if near else f"use one of {', '.join(known)}"

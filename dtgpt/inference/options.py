"""What a prompt may be continued with: every option of `Model.generate` and `dtgpt generate`, with its checks."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

from dtgpt.inference.request import Search
from dtgpt.inference.sampling import MOST_SEQUENCES, Option, Sampling, declared
from dtgpt.models.config import ModelConfig
from dtgpt.util import seams
from dtgpt.util.errors import UserError, shown, shown_name
from dtgpt.util.field_types import Bounds

NEW_TOKENS = 64  # where nothing is said of it
LONGEST_ID = 20  # digits
MOST_ALTERNATIVES = 20
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

    do_sample: Annotated[bool, "false: always the likeliest token, as temperature 0"] = True
    num_return_sequences: Annotated[
        int, "number of texts for each prompt; of a beam search, the best ones", Bounds(1, MOST_SEQUENCES)
    ] = 1
    stop_strings: Annotated[
        tuple[str, ...], "texts before the first of which the text ends, also across tokens; up to 16"
    ] = ()
    split_special_tokens: Annotated[
        bool, "names of special tokens in the prompt are text as any other, and not these tokens"
    ] = False
    top_logprobs: Annotated[
        int, "likeliest tokens to return with their log-probabilities, at each new token", Bounds(0, MOST_ALTERNATIVES)
    ] = 0
    prompt_logprobs: Annotated[bool, "return the log-probabilities of the prompt's tokens"] = False

    search: Search | None = None  # in place of draws

    def settled(self) -> "Options":
        """Return these options with a temperature of 0 where they leave the likeliest token alone: without draws, and
        with a top_p of 0, which `Sampling` takes for no filter, as Megatron-LM does."""
        return self if self.do_sample and self.top_p > 0 else replace(self, temperature=0.0, top_p=1.0)


class SearchKind(Protocol):
    """A kind of search, with options of its own: what a capability has at the seam `searches`."""

    options: dict[str, Option]

    def make(self, given: Mapping[str, Any], options: Options) -> Search | None:
        """Return the search that the options given by name ask for, None where they ask for none. Raise UserError where
        one is wrong, or does not go with the other options."""


def _in_order() -> dict[str, Option]:
    """Return all options by name, those of searches behind the number of sequences."""
    found = dict[str, Option]()
    for name, option in declared(Options).items():
        found[name] = option
        for kind in seams.listed("searches") if name == "num_return_sequences" else ():
            found |= kind.options
    return found


OPTIONS = _in_order()
NAMES = tuple(OPTIONS)
INITIAL: dict[str, Any] = {
    "max_new_tokens": 200,
    "temperature": 0.8,
    "top_k": 50,
}  # where a person asks: on a terminal or a page


def read_options(given: Mapping[str, Any], prompt_length: int, config: ModelConfig, most: int = NEW_TOKENS) -> Options:
    """Return the options `given` by name, None where one is left out, for a prompt of `prompt_length` tokens. Without
    `max_new_tokens`, there are `most` or as many as the positions of the model leave.

    Raise UserError for a name or a value that does not exist.
    """
    for name in given:
        if name not in NAMES:
            raise UserError(f"there is no option {shown_name(name)}; {advice(name)}")
    known = {name: plain(name, value) for name, value in given.items() if value is not None}
    known.setdefault("max_new_tokens", max(1, min(most, config.seq_length - prompt_length)))
    options = Options(**{name: value for name, value in known.items() if name in declared(Options)})
    options.validate(config.vocab_size, config.seq_length)
    for kind in seams.listed("searches"):
        found = kind.make({name: known[name] for name in kind.options if name in known}, options)
        options = options if found is None else replace(options, search=found)
    return options.settled()


def advice(name: str, known: tuple[str, ...] = NAMES) -> str:
    """Return what a user may have meant by a name that is not one of `known`."""
    elsewhere = ELSEWHERE.get(name)
    near = elsewhere if elsewhere in known else next(iter(difflib.get_close_matches(str(name)[:99], known, n=1)), None)
    return f"did you mean {near}?" if near else f"use one of {', '.join(known)}"


def plain(name: str, value: Any) -> Any:
    """Return a value in the type of its field: lists of texts and ids, and keys of ids, come in several."""
    if name == "stop_strings":
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    if name == "stop_token_ids":
        return (value,) if isinstance(value, int) else tuple(value) if isinstance(value, list) else value
    if name == "logit_bias" and isinstance(value, Mapping):
        return biases((int(key) if spells_id(key) else key, bias) for key, bias in value.items())
    return value


def biases(given: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a bias of logits by its tokens. Raise UserError for a token that is given twice."""
    found: dict[Any, Any] = {}
    for token, bias in given:
        if token in found:
            raise UserError(f"logit_bias has the token {shown(token)} twice; leave one out")
        found[token] = bias
    return found


def spells_id(key: Any) -> bool:
    """Return whether a key, which JSON has as a text, may be an id."""
    return isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < LONGEST_ID

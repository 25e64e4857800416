"""What a prompt may be continued with: every option of `Model.generate` and `dtgpt generate`, with its checks."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from dtgpt.inference.sampling import Control, Offer, Sampling, declared
from dtgpt.models.config import ModelConfig
from dtgpt.util.errors import UserError, shown, shown_name
from dtgpt.util.field_types import Bounds

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

    do_sample: Annotated[bool, "false: always the likeliest token, as temperature 0", Offer(command=None)] = True
    num_return_sequences: Annotated[
        int, "number of texts for each prompt; of a beam search, the best ones", Bounds(1, MOST_SEQUENCES),
        Offer(command="num_samples", openai="n", page=Control("main", "Answers")),
    ] = 1  # fmt: skip
    num_beams: Annotated[
        int, "sequences that a beam search follows, in which nothing is drawn; 1: no search", Bounds(1, MOST_SEQUENCES),
        Offer(openai=None, megatron="beam_width"),
    ] = 1  # fmt: skip
    length_penalty: Annotated[
        float, "a beam scores the sum of its log-probabilities / length ** length_penalty", Bounds(-10, 10),
        Offer(openai=None, megatron="length_penalty"),
    ] = 1.0  # fmt: skip
    early_stopping: Annotated[
        bool, "end a beam search as soon as num_beams sequences have ended", Offer(openai=None)
    ] = False
    stop_strings: Annotated[
        tuple[str, ...], "texts before the first of which the text ends, also across tokens; up to 16",
        Offer(openai="stop", page=Control("end", "Stop at", example="\\n\\n")),
    ] = ()  # fmt: skip
    split_special_tokens: Annotated[
        bool, "names of special tokens in the prompt are text as any other, and not these tokens", Offer()
    ] = False
    top_logprobs: Annotated[
        int, "likeliest tokens to return with their log-probabilities, at each new token", Bounds(0, MOST_ALTERNATIVES),
        Offer(command=None, openai=None),
    ] = 0  # fmt: skip
    prompt_logprobs: Annotated[
        bool, "return the log-probabilities of the prompt's tokens", Offer(command=None, openai=None)
    ] = False

    def validate(self, vocab_size: int, positions: int) -> None:
        """Raise UserError for a value that a model of these sizes cannot work with."""
        super().validate(vocab_size, positions)
        for name in ("stop_strings", "stop_on_eol", "stop_on_double_eol", "top_logprobs"):
            if self.num_beams > 1 and getattr(self, name):
                raise UserError(f"a beam search does not take {name}; leave it out, or use num_beams=1")
        for name in ("length_penalty", "early_stopping"):
            if self.num_beams == 1 and (value := getattr(self, name)) != OPTIONS[name].default:
                raise UserError(f"{name}={value} is for a beam search; give num_beams, or leave it out")

    def settled(self) -> "Options":
        """Return these options with a temperature of 0 where they leave the likeliest token alone: without draws, and
        with a top_p of 0, which `Sampling` takes for no filter, as Megatron-LM does."""
        draws = self.do_sample and self.top_p > 0
        return self if draws else replace(self, temperature=0.0, top_p=1.0)


OPTIONS = declared(Options)
NAMES = tuple(OPTIONS)


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
    options = Options(**known)
    options.validate(config.vocab_size, config.seq_length)
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


def biases(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a bias of logits by its tokens. Raise UserError for a token that is given twice."""
    found: dict[Any, Any] = {}
    for token, bias in pairs:
        if token in found:
            raise UserError(f"logit_bias has the token {shown(token)} twice; leave one out")
        found[token] = bias
    return found


def spells_id(key: Any) -> bool:
    """Return whether a key, which JSON has as a text, may be an id."""
    return isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < LONGEST_ID

"""What a prompt may be continued with: every option of `Model.generate` and `dtgpt generate`, with its checks.

An option is declared once, as a field of `Options`: its type, its help, its bounds and its default. The command line,
the server and the page read them from there. A capability may add options that ask for a search.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, NamedTuple, Protocol, get_args, get_origin, get_type_hints

from dtgpt.models.config import ModelConfig
from dtgpt.ops.sampling.sequences import MOST_BIASES, MOST_NGRAM, MOST_STOPS
from dtgpt.util import seams
from dtgpt.util.errors import UserError, shown, shown_name
from dtgpt.util.field_types import Bounds

NEW_TOKENS = 64  # where nothing is said of it
LONGEST_ID = 20  # digits
MOST_ALTERNATIVES = 20
MOST_STOP_STRINGS, LONGEST_STOP_STRING = 16, 256  # characters
GREEDY_BELOW = 1e-4  # a lower temperature takes the likeliest token: quotients by it would leave fp32
LARGEST = 2**31 - 1
MOST_SEQUENCES = 128  # of a prompt
BIAS = 100  # largest absolute value, as in OpenAI's API
FRACTION, PENALTY = Bounds(0, 1), Bounds(-2, 2)
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
    "repetition_penalty": "frequency_penalty",
    "logprobs": "top_logprobs",
    "ignore_eos": "ends",
}
Candidates = Sequence[tuple[int, float]]  # (id, log-probability) of the likeliest tokens of a row


class Search(Protocol):
    """How the host searches for the sequences of a request, in place of draws: what a capability adds."""

    @property
    def rows(self) -> int:
        """The number of slots that it needs at once."""

    @property
    def words(self) -> tuple[str, str, str]:
        """What a row is called in messages, the option that asks for the search, and the one that does not."""

    def validate(self, job: Any, vocab_size: int) -> None:
        """Raise UserError for a request that cannot be searched like this."""

    def begin(self, job: Any, slots: list[int]) -> "SearchedRows":
        """Return the search for a request whose first slot has read the prompt."""


class SearchedRows(Protocol):
    """A search on its way. The choices of the request are its rows, in the slots that it was given."""

    @property
    def alternatives(self) -> int:
        """The number of likeliest tokens of each row that `advance` needs."""

    def advance(self, candidates: Mapping[int, Candidates], command: Callable[[Any], Any]) -> list[int]:
        """Choose the rows of the next step from the likeliest tokens of each choice, after all rules, and put them into
        slots by commands (`dtgpt.inference.commands`). Return their choices; none: the search is over."""

    def events(self, handle: int) -> list[Any]:
        """Return an `Event` for each sequence that the request asks for, the best first."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How sequences go on from a prompt, where they end, and what is returned of them."""

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

    def validate(self, vocab_size: int, positions: int) -> None:
        """Raise UserError for a value that a model of these sizes cannot work with."""
        for option in declared(Options).values():
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

    def settled(self) -> "Options":
        """Return these options with a temperature of 0 where they leave the likeliest token alone: without draws, and
        with a top_p of 0, which sampling itself takes for no filter."""
        return self if self.do_sample and self.top_p > 0 else replace(self, temperature=0.0, top_p=1.0)


class Option(NamedTuple):
    """A declared field of a dataclass of options."""

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


def read_options(given: Mapping[str, Any], prompt_length: int, config: ModelConfig, most: int = NEW_TOKENS) -> Options:
    """Return the options `given` by name, None where one is left out, for a prompt of `prompt_length` tokens. Without
    `max_new_tokens`, there are `most` or as many as the positions of the model leave.

    Raise UserError for a name or a value that does not exist.
    """
    for name in given:
        if name not in NAMES:
            raise UserError(f"there is no option {shown_name(name)}; {advice(name, NAMES)}")
    known = {name: plain(name, value) for name, value in given.items() if value is not None}
    known.setdefault("max_new_tokens", max(1, min(most, config.seq_length - prompt_length)))
    options = Options(**{name: value for name, value in known.items() if name in declared(Options)})
    options.validate(config.vocab_size, config.seq_length)
    for kind in seams.listed("searches"):
        found = kind.make({name: known[name] for name in kind.options if name in known}, options)
        options = options if found is None else replace(options, search=found)
    return options.settled()


def advice(name: str, known: tuple[str, ...]) -> str:
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


def check_stop_strings(strings: Sequence[str]) -> None:
    """Raise UserError where there are too many stop strings, or one of them is empty or too long."""
    if len(strings) > MOST_STOP_STRINGS:
        raise UserError(f"{len(strings)} stop strings are too many; use up to {MOST_STOP_STRINGS}")
    for stop in strings:
        if not isinstance(stop, str) or not 1 <= len(stop) <= LONGEST_STOP_STRING:
            raise UserError(
                f"the stop string {shown(stop)} is not a text of 1 to {LONGEST_STOP_STRING} characters; change it"
            )


# Last, since capabilities import this file.
OPTIONS = _in_order()
NAMES = tuple(OPTIONS)
INITIAL: dict[str, Any] = {
    "max_new_tokens": 200,
    "temperature": 0.8,
    "top_k": 50,
}  # where a person asks: on a terminal or a page

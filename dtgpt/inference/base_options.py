"""What a continuation may be asked for: the options that every model has, how an option is declared, and its checks.

An option is declared once, as a field: its type, its help, its bounds and its default. The command line, the server and
the page read them from there. A capability brings options of its own in a class that derives from `BaseOptions`, with
what they change in its methods; `dtgpt.inference.options` has them all.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_args, get_origin, get_type_hints

from torch import Tensor

from dtgpt.ops.sampling.sequences import MOST_STOPS, Variant, pack
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, shown
from dtgpt.util.field_types import Bounds

MOST_ALTERNATIVES = 20
GREEDY_BELOW = 1e-4  # a lower temperature takes the likeliest token: quotients by it would leave fp32
LARGEST = 2**31 - 1
MOST_SEQUENCES = 128  # of a prompt
FRACTION = Bounds(0, 1)
Candidates = Sequence[tuple[int, float]]  # (id, log-probability) of the likeliest tokens of a row


class SpecialIds(NamedTuple):
    """Ids that rules need: those at which texts end, and tokens of the tokenizer; None where it has no such token."""

    ends: tuple[int, ...] = ()
    newline: int | None = None  # "\n"
    double_newline: int | None = None  # "\n\n"
    colon: int | None = None  # ":"


class Values(NamedTuple):
    """The rule of an option whose values are no numbers."""

    check: Callable[[str, Any, int], None]  # (name, value, vocab_size): raises UserError for a wrong one
    from_words: Callable[[str, Sequence[str]], Any] = lambda name, words: words  # of the option --NAME
    read: Callable[[Any], Any] | None = None  # from what JSON has; None: a list, or one alone
    form: str = ""  # of a word, for the help


def read_number(option: str, word: str, kind: type, example: str) -> Any:
    """Return the number that a word of a command line is. Raise UserError where it is none."""
    try:
        return kind(word)
    except ValueError:
        raise UserError(f"{option} takes words such as {example}, and {shown(word)} is not a number") from None


def check_ids(name: str, ids: Any, vocab_size: int) -> None:
    """Raise UserError for what is not a list of ids."""
    if not isinstance(ids, tuple | list):
        raise UserError(f"{name}={shown(ids)} is not a list; give a list of token ids")
    if len(ids) > MOST_STOPS:
        raise UserError(f"{name} has {len(ids)} tokens; give {MOST_STOPS} at most")
    for token in ids:
        check_whole(f"a token of {name}", token, 0, vocab_size - 1)


IDS = Values(check_ids, lambda name, words: [read_number(name, word, int, "50256") for word in words])


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """How sequences go on from a prompt, where they end, and what is returned of them."""

    headings: ClassVar[dict[str, str]] = {}  # in `dtgpt generate --help`, from the named field on
    max_new_tokens: Annotated[
        int,
        "largest number of tokens to add; lower by default where the model has fewer positions left",
        Bounds(0, LARGEST),
    ] = 64
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
    seed: Annotated[int, "seed of the draws: the same seed gives the same text", Bounds(-(2**63), 2**64 - 1)] = 0
    stop_token_ids: Annotated[tuple[int, ...], "ids of tokens that end a text", IDS] = ()
    ends: Annotated[bool, "end a text at the end-of-text tokens of the model"] = True
    do_sample: Annotated[bool, "false: always the likeliest token, as temperature 0"] = True
    num_return_sequences: Annotated[
        int, "number of texts for each prompt; of a beam search, the best ones", Bounds(1, MOST_SEQUENCES)
    ] = 1
    split_special_tokens: Annotated[
        bool, "names of special tokens in the prompt are text as any other, and not these tokens"
    ] = False
    top_logprobs: Annotated[
        int, "likeliest tokens to return with their log-probabilities, at each new token", Bounds(0, MOST_ALTERNATIVES)
    ] = 0

    def validate(self, vocab_size: int, positions: int) -> None:
        """Raise UserError for a value that a model of these sizes cannot work with."""
        for option in declared(type(self)).values():  # type: ignore[arg-type]
            option.check(getattr(self, option.name), vocab_size, positions)

    @property
    def rows(self) -> int:
        """The slots of the cache that a prompt takes at once."""
        return self.num_return_sequences

    @property
    def counted_rows(self) -> str:
        """The same in words."""
        return counted(self.rows, "choice")

    @property
    def answers_by_prompt(self) -> bool:
        """Whether there is something to return of a prompt without any new token."""
        return False

    def check_job(self, job: Any, vocab_size: int) -> None:
        """Raise UserError for a `PromptJob` that cannot have these options."""

    def check_exact(self) -> None:
        """Raise UserError where log-probabilities cannot have the bits of training's forward pass."""

    def settled(self) -> Self:
        """Return these options with a temperature of 0 where they leave the likeliest token alone: without draws, and
        with a top_p of 0, which sampling itself takes for no filter. Raise UserError where some contradict others."""
        return self if self.do_sample and self.top_p > 0 else replace(self, temperature=0.0, top_p=1.0)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def variant(self) -> Variant:
        """What a step must be able to do for a sequence."""
        return Variant(filters=not self.greedy and (self.top_k > 0 or 0 < self.top_p < 1))

    def parameters(
        self, special: SpecialIds, numbers: Mapping[str, float], bias: Mapping[int, float] | None = None
    ) -> Tensor:
        """Return a row of parameters for `dtgpt.ops.sampling`, int64 on the CPU: `numbers`, by the names of its fields,
        and those of the options."""
        own = {"temperature": 0.0 if self.temperature < GREEDY_BELOW else self.temperature}
        own |= {"top_k": self.top_k, "top_p": self.top_p}
        return pack({**numbers, **own}, bias or {}, self.end_ids(special))

    def end_ids(self, special: SpecialIds) -> list[int]:
        """Return the ids that end a sequence whatever comes before them."""
        return [*self.stop_token_ids, *(special.ends if self.ends else ())]

    def decisive_ids(self, special: SpecialIds) -> set[int | None]:
        """Return the ids at which `ends_at` or `bans_all` may be true, where log-probabilities are finite."""
        return {*self.end_ids(special)}

    def ends_at(self, special: SpecialIds, before: int, token: int, index: int) -> bool:
        """Return whether new token number `index`, from 0, ends the sequence. `before`: the token before it."""
        return token in self.end_ids(special)

    def bans_all(self, special: SpecialIds, prompt: list[int], new: list[int], token: int, logprob: float) -> bool:
        """Return whether rules banned every token after `new` ones: `sample` then chose id 0, which is banned, too."""
        return token == 0 and logprob == -math.inf

    def check_tokenizer(self, job: Any, tokenizer: Any) -> None:
        """Raise UserError where a `PromptJob` cannot be done with a tokenizer; None: there is none."""

    @property
    def reads_text(self) -> bool:
        """Whether the text decides where a sequence ends."""
        return False

    def text_end(self, job: Any) -> Any:
        """Return the `TextEnd` of a sequence of a `PromptJob`; None where its tokens alone decide where it ends."""
        return None


class Option(NamedTuple):
    """A declared field of a dataclass of options."""

    name: str
    kind: Any  # bool, int, float, or a tuple or Mapping of these
    help: str
    least: float
    most: float
    default: Any
    values: Values | None  # of kinds that are no numbers

    def check(self, value: Any, vocab_size: int = LARGEST, positions: int = LARGEST, name: str = "") -> None:
        """Raise UserError for a value that a model of these sizes cannot work with. `name`: of the option for the user,
        where it is not that of the field."""
        name = name or self.name
        if self.values is not None:
            self.values.check(name, value, vocab_size)
        elif self.kind is bool:
            check_switches(**{name: value})
        elif self.kind is int:
            sizes = {"max_new_tokens": positions, "min_new_tokens": positions, "top_logprobs": vocab_size}
            check_whole(name, value, self.least, min(self.most, sizes.get(self.name, self.most)))
        else:
            check_number(name, value, self.least, self.most)

    def read(self, value: Any) -> Any:
        """Return a value in the type of its field: lists of texts and ids, and keys of ids, come in several."""
        if self.values is None:
            return value
        if self.values.read is not None:
            return self.values.read(value)
        if isinstance(value, get_args(self.kind)[0]):
            return (value,)
        return tuple(value) if isinstance(value, list) else value


@cache
def declared(kind: Any) -> dict[str, Option]:
    """Return the declared options of a dataclass, by name."""
    hints, found = get_type_hints(kind, include_extras=True), {}
    for one in fields(kind):
        if get_origin(hints[one.name]) is Annotated:
            type_, text, *rules = get_args(hints[one.name])
            values = next((rule for rule in rules if isinstance(rule, Values)), None)
            limits = next((rule for rule in rules if isinstance(rule, Bounds)), Bounds())
            least, most = (math.nan if limit is None else limit for limit in (limits.at_least, limits.at_most))
            default = {} if get_origin(type_) is Mapping else one.default
            found[one.name] = Option(one.name, type_, text, least, most, default, values)
    return found


def check_switches(**values: Any) -> None:
    """Raise UserError for a value that is neither true nor false: a text such as "off" would be taken for true."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise UserError(f"{name}={shown(value)} is not a switch; use true or false")


def check_whole(name: str, value: Any, least: float, most: float) -> None:
    """Raise UserError for what is not a whole number within bounds. True and False are not numbers."""
    if type(value) is not int or not least <= value <= most:
        raise UserError(f"{name}={shown(value)} is not valid; use a whole number from {least} to {most}")


def check_number(name: str, value: Any, least: float, most: float) -> None:
    """Raise UserError for what is not a number within bounds. A whole number stands for a float."""
    if type(value) not in (int, float) or not least <= value <= most:
        raise UserError(f"{name}={shown(value)} is not valid; use a number from {least:g} to {most:g}")

"""What a request of lm-evaluation-harness says of a text to generate, as options of dtgpt."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from dtgpt.inference.options import NAMES, advice
from dtgpt.inference.rules.options import LONGEST_STOP_STRING, MOST_STOP_STRINGS
from dtgpt.util.errors import UserError, shown, shown_name

NEW_TOKENS = 256  # where a task says nothing, as the harness's `hf` back end
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of one number
# Options of transformers that change no text here, by the values that do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_return_sequences": (1,),
    "use_cache": (True, False),
    "skip_special_tokens": (True,),
}


class Wanted(NamedTuple):
    """What is wanted of a generated text."""

    new_tokens: int  # at most
    until: list[str]  # the text ends before the first of them
    options: dict[str, Any]  # for `read_options`

    def cut(self, text: str) -> str:
        """Return the text before the first stop string."""
        return text[: min([at for stop in self.until if (at := text.find(stop)) >= 0], default=len(text))]


def read_generation(given: Mapping[str, Any], positions: int, end: str | None = None) -> Wanted:
    """Return what the generation arguments of a request ask for. Without `do_sample` or a temperature, it is always the
    likeliest token. `end`: the name of the end of text, before which a text ends, too. Raise UserError for an argument
    that does not exist, and for more tokens than fit."""
    left = dict(given)
    lengths = [value for name in LENGTHS if (value := left.pop(name, None)) is not None]
    until = _texts(left.pop("until", None)) + ([] if end is None else [end])
    temperature = _number("temperature", left.pop("temperature", None) or 0.0, float)
    samples = left.pop("do_sample", None)
    if not (samples if samples is not None else temperature > 0):
        temperature = 0.0
    left = {name: value for name, value in left.items() if value not in NEUTRAL.get(name, ())}
    for name in left:
        if name not in NAMES or name in NEUTRAL:
            raise UserError(
                f"the task asks for {shown_name(name)}={shown(left[name])}, which does not exist here; "
                f"{advice(name, NAMES)}, with --gen_kwargs"
            )
    new = _number("max_gen_toks", lengths[0], int) if lengths else min(NEW_TOKENS, positions // 2)
    if not 1 <= new < positions:
        raise UserError(
            f"max_gen_toks={new} leaves no context in the model's {positions} positions; use 1 to {positions - 1}, "
            "with --gen_kwargs"
        )
    stops = [stop for stop in until if len(stop) <= LONGEST_STOP_STRING][:MOST_STOP_STRINGS]
    if left.get("num_beams", 1) == 1:  # a search does not look at texts: they are cut when it is over
        left["stop_strings"] = stops
    return Wanted(new, until, {**left, "temperature": temperature})


def _number(name: str, value: Any, kind: type) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{name}={shown(value)} is not a number; change it with --gen_kwargs") from None


def _texts(until: Any) -> list[str]:
    """Return stop strings that are not empty."""
    several = [] if until is None else [until] if isinstance(until, str) else until
    if not isinstance(several, list | tuple) or not all(isinstance(stop, str) for stop in several):
        raise UserError(f"until={shown(until)} is not a text or a list of texts; change it with --gen_kwargs")
    return [stop for stop in several if stop]

"""The rules of Megatron-LM's `PUT /api` as a table, in the order in which they are checked, for its types and for ours.

Sentences and order are those of a server of Megatron-LM, whose recorded answers are checked against this table. Types
differ in two ways: there `true` is the integer 1, and an integer is not a float.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Types(NamedTuple):
    """What passes for a number."""

    is_integer: Callable[[Any], bool]
    is_float: Callable[[Any], bool]
    prompts: tuple[type, ...]  # types of a prompt with which the checks go on


MEGATRON = Types(lambda x: isinstance(x, int), lambda x: isinstance(x, float), (str, list, dict))
OURS = Types(lambda x: type(x) is int, lambda x: type(x) in (int, float), (str,))
FAILS = "a prompt is not a string"  # in place of a sentence: Megatron-LM fails inside
TOP_K = "equal to or greater than 0 and less than or equal to 1000"
TEMPERATURE = "temperature must be a positive number less than or equal to 100.0"

Broken = Callable[[dict[str, Any], Types], bool]


def not_bool(key: str) -> tuple[str, Broken]:
    return f"{key} must be a boolean value", lambda r, t: not isinstance(r.get(key, False), bool)


def not_integer(key: str, sentence: str) -> tuple[str, Broken]:
    return sentence, lambda r, t: key in r and not t.is_integer(r[key])


def not_float(key: str, sentence: str) -> tuple[str, Broken]:
    return sentence, lambda r, t: key in r and not t.is_float(r[key])


RULES: list[tuple[str, Broken]] = [
    ("prompts argument required", lambda r, t: "prompts" not in r),
    ("max_len is no longer used.  Replace with tokens_to_generate", lambda r, t: "max_len" in r),
    ("sentences is no longer used.  Replace with prompts", lambda r, t: "sentences" in r),
    ("prompts is not a list of strings", lambda r, t: not isinstance(r["prompts"], list)),
    ("prompts is empty", lambda r, t: r["prompts"] == []),
    ("Maximum number of prompts is 128", lambda r, t: len(r["prompts"]) > 128),
    not_integer("tokens_to_generate", "tokens_to_generate must be an integer greater than 0"),
    (
        "tokens_to_generate must be an integer greater than or equal to 0",
        lambda r, t: r.get("tokens_to_generate", 0) < 0,
    ),
    not_bool("logprobs"),
    (
        "tokens_to_generate=0 implies logprobs should be True",
        lambda r, t: r.get("tokens_to_generate", 64) == 0 and not r.get("logprobs", False),
    ),
    (TEMPERATURE, lambda r, t: "temperature" in r and type(r["temperature"]) not in (int, float)),
    (TEMPERATURE, lambda r, t: not 0 < r.get("temperature", 1) <= 100),
    (f"top_k must be an integer {TOP_K}", lambda r, t: "top_k" in r and type(r["top_k"]) is not int),
    (f"top_k must be {TOP_K}", lambda r, t: not 0 <= r.get("top_k", 0) <= 1000),
    not_float("top_p", "top_p must be a positive float less than or equal to 1.0"),
    ("cannot set both top-k and top-p samplings.", lambda r, t: r.get("top_k", 0) > 0 and r.get("top_p", 0) > 0),
    ("top_p must be less than or equal to 1.0", lambda r, t: not 0 <= r.get("top_p", 0) <= 1),
    not_float("top_p_decay", "top_p_decay must be a positive float less than or equal to 1.0"),
    ("top_p_decay cannot be set without top_p", lambda r, t: "top_p_decay" in r and r.get("top_p", 0) == 0),
    ("top_p_decay must be less than or equal to 1.0", lambda r, t: not 0 <= r.get("top_p_decay", 0) <= 1),
    not_float("top_p_bound", "top_p_bound must be a positive float less than or equal to top_p"),
    ("top_p_bound cannot be set without top_p", lambda r, t: "top_p_bound" in r and r.get("top_p", 0) == 0),
    (
        "top_p_bound must be greater than 0 and less than top_p",
        lambda r, t: "top_p_bound" in r and not 0 < r["top_p_bound"] <= r["top_p"],
    ),
    not_bool("add_BOS"),
    (FAILS, lambda r, t: not all(isinstance(prompt, t.prompts) for prompt in r["prompts"])),
    (
        "Empty prompts require add_BOS=true",
        lambda r, t: not r.get("add_BOS", False) and any(len(prompt) == 0 for prompt in r["prompts"]),
    ),
    not_bool("stop_on_double_eol"),
    not_bool("stop_on_eol"),
    not_bool("prevent_newline_after_colon"),
    not_integer("random_seed", "random_seed must be integer"),
    ("random_seed must be a positive integer", lambda r, t: r.get("random_seed", 0) < 0),
    not_bool("no_log"),
    not_integer("beam_width", "beam_width must be integer"),
    ("beam_width must be an integer > 1", lambda r, t: r.get("beam_width", 1) < 1),
    ("When doing beam_search, batch size must be 1", lambda r, t: "beam_width" in r and len(r["prompts"]) > 1),
    not_integer("stop_token", "stop_token must be an integer"),
    not_float("length_penalty", "length_penalty must be a float"),
    (FAILS, lambda r, t: not all(isinstance(prompt, str) for prompt in r["prompts"])),
]  # fmt: skip


def refusal(request: dict[str, Any], types: Types) -> str | None:
    """The sentence of the first rule that a request breaks, lengths apart; None: it is accepted."""
    return next((sentence for sentence, broken in RULES if broken(request, types)), None)


def length_refusal(request: dict[str, Any], lengths: list[int], positions: int) -> str | None:
    """The sentence about the lengths of accepted prompts, in tokens, if they are too long."""
    new, longest = request.get("tokens_to_generate", 64), max(lengths)
    if "beam_width" in request:
        return "context length + tokens_to_generate too large" if longest >= min(longest + new, positions) else None
    whole = longest + new
    if whole > positions:
        return "Length of prompt + tokens_to_generate longer than allowed"
    tokens = whole * len(lengths)
    return f"Too many tokens.  {tokens} is greater than 12000" if tokens > 12000 else None

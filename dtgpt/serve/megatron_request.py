"""Requests to Megatron-LM's `PUT /api` of 2023: the keys, and the rules that they must keep, in the order in which its
server checks them.

A sentence about a broken rule is Megatron-LM's own, blanks included: clients compare and print these sentences. Two
rules about types differ on purpose: `true` and `false` are never numbers, and an integer stands for a float.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from dtgpt.inference.options import OPTIONS
from dtgpt.util.errors import UserError
from dtgpt.util.rules import Condition, Is, Missing, Other, Rule, Rules, Values, check_rules

MOST_PROMPTS = 128
HIGHEST_TEMPERATURE, MOST_TOP_K = float(OPTIONS["temperature"].most), 1000
LARGEST_SEED = OPTIONS["seed"].most
OPTION_KEYS = {  # options of generation -> keys
    "max_new_tokens": "tokens_to_generate",
    "seed": "random_seed",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "top_p_decay": "top_p_decay",
    "top_p_bound": "top_p_bound",
    "prevent_newline_after_colon": "prevent_newline_after_colon",
    "stop_on_eol": "stop_on_eol",
    "stop_on_double_eol": "stop_on_double_eol",
}
NOT_TEXTS = "prompts is not a list of strings"
TEMPERATURE = f"temperature must be a positive number less than or equal to {HIGHEST_TEMPERATURE}"
TOP_K = f"equal to or greater than 0 and less than or equal to {MOST_TOP_K}"
BOUND = "top_p_bound must be greater than 0 and less than top_p"


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """The keys of a request that keeps the rules, by their names there."""

    prompts: list[str]
    tokens_to_generate: int = 64  # 0: score the prompts
    logprobs: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 0.0  # 0: all tokens
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    add_BOS: bool = False
    stop_on_double_eol: bool = False
    stop_on_eol: bool = False
    prevent_newline_after_colon: bool = False
    random_seed: int | None = None
    no_log: bool = False
    beam_width: int | None = None  # None: no beam search
    stop_token: int | None = None  # of beams alone; None: the end of text
    length_penalty: float = 1.0


class Not(Condition):
    """A key has a value of another type than these."""

    def __init__(self, name: str, *types: type):
        super().__init__(name)
        self.types = types

    def fits(self, values: Values, name: str) -> bool:
        return type(values.look(name)) not in self.types


class Where(Condition):
    """A function of the config says of a field that it cannot be so. Its docstring says when."""

    def __init__(self, name: str, function: Callable[[Any], bool]):
        super().__init__(name)
        self.function = function

    def fits(self, values: Values, name: str) -> bool:
        return self.function(values.config)

    def __str__(self) -> str:
        return f"{self.names[0]}: {self.function.__doc__ or self.function.__name__}"


class Sent(Condition):
    """A key is in the request, whatever its value."""

    def fits(self, values: Values, name: str) -> bool:
        return name in values.others["sent"]


def has_other_than_texts(request: dict[str, Any]) -> bool:
    """Something among the prompts is not a text."""
    return not all(isinstance(prompt, str) for prompt in request["prompts"])


def has_empty_prompt(request: dict[str, Any]) -> bool:
    """A prompt is empty."""
    return not all(request["prompts"])


RULES: Rules = (  # `sent`: the keys of the request; `count`: of the prompts
    Rule("max_len is no longer used.  Replace with tokens_to_generate", Sent("max_len")),
    Rule("sentences is no longer used.  Replace with prompts", Sent("sentences")),
    Rule(NOT_TEXTS, Not("prompts", list)),
    Rule("prompts is empty", Is("count", "==", 0)),
    Rule(f"Maximum number of prompts is {MOST_PROMPTS}", Is("count", ">", MOST_PROMPTS)),
    Rule("tokens_to_generate must be an integer greater than 0", Not("tokens_to_generate", int)),
    Rule("tokens_to_generate must be an integer greater than or equal to 0", Is("tokens_to_generate", "<", 0)),
    Rule("logprobs must be a boolean value", Not("logprobs", bool)),
    Rule("tokens_to_generate=0 implies logprobs should be True", Missing("logprobs"), Missing("tokens_to_generate")),
    Rule(TEMPERATURE, Not("temperature", int, float)),
    Rule(TEMPERATURE, Missing("temperature")),
    Rule(TEMPERATURE, Is("temperature", "<", 0)),
    Rule(TEMPERATURE, Is("temperature", ">", HIGHEST_TEMPERATURE)),
    Rule(f"top_k must be an integer {TOP_K}", Not("top_k", int)),
    Rule(f"top_k must be {TOP_K}", Is("top_k", "<", 0)),
    Rule(f"top_k must be {TOP_K}", Is("top_k", ">", MOST_TOP_K)),
    Rule("top_p must be a positive float less than or equal to 1.0", Not("top_p", int, float)),
    Rule("cannot set both top-k and top-p samplings.", Is("top_p", ">", 0), Is("top_k", ">", 0)),
    Rule("top_p must be less than or equal to 1.0", Is("top_p", "<", 0)),
    Rule("top_p must be less than or equal to 1.0", Is("top_p", ">", 1)),
    Rule("top_p_decay must be a positive float less than or equal to 1.0", Not("top_p_decay", int, float)),
    Rule("top_p_decay cannot be set without top_p", Sent("top_p_decay"), Missing("top_p")),
    Rule("top_p_decay must be less than or equal to 1.0", Is("top_p_decay", "<", 0)),
    Rule("top_p_decay must be less than or equal to 1.0", Is("top_p_decay", ">", 1)),
    Rule("top_p_bound must be a positive float less than or equal to top_p", Not("top_p_bound", int, float)),
    Rule("top_p_bound cannot be set without top_p", Sent("top_p_bound"), Missing("top_p")),
    Rule(BOUND, Sent("top_p_bound"), Missing("top_p_bound")),
    Rule(BOUND, Sent("top_p_bound"), Is("top_p_bound", "<", 0)),
    Rule(BOUND, Sent("top_p_bound"), Is("top_p_bound", ">", Other("top_p"))),
    Rule("add_BOS must be a boolean value", Not("add_BOS", bool)),
    Rule(NOT_TEXTS, Where("prompts", has_other_than_texts)),  # its server fails here
    Rule("Empty prompts require add_BOS=true", Missing("add_BOS"), Where("prompts", has_empty_prompt)),
    Rule("stop_on_double_eol must be a boolean value", Not("stop_on_double_eol", bool)),
    Rule("stop_on_eol must be a boolean value", Not("stop_on_eol", bool)),
    Rule("prevent_newline_after_colon must be a boolean value", Not("prevent_newline_after_colon", bool)),
    Rule("random_seed must be integer", Sent("random_seed"), Not("random_seed", int)),
    Rule("random_seed must be a positive integer", Sent("random_seed"), Is("random_seed", "<", 0)),
    Rule(
        f"random_seed is too large; use 0 to {LARGEST_SEED}",
        Sent("random_seed"),
        Is("random_seed", ">", LARGEST_SEED),
    ),
    Rule("no_log must be a boolean value", Not("no_log", bool)),
    Rule("beam_width must be integer", Sent("beam_width"), Not("beam_width", int)),
    Rule("beam_width must be an integer > 1", Sent("beam_width"), Is("beam_width", "<", 1)),
    Rule("When doing beam_search, batch size must be 1", Sent("beam_width"), Is("count", "!=", 1)),
    Rule("stop_token must be an integer", Sent("stop_token"), Not("stop_token", int)),
    Rule("length_penalty must be a float", Not("length_penalty", int, float)),
)


def read_request(body: Any) -> ApiRequest:
    """Return the request of a JSON value; unknown keys are ignored. Raise UserError with the sentence of the first rule
    that the value breaks."""
    if not isinstance(body, dict) or "prompts" not in body:
        raise UserError("prompts argument required")
    request = {field.name: body.get(field.name, field.default) for field in fields(ApiRequest)}
    prompts = body["prompts"]
    check_rules(RULES, request, sent=body, count=len(prompts) if isinstance(prompts, list) else 0)
    return ApiRequest(**request)

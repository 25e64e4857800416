"""Requests to Megatron-LM's `PUT /api` of 2023: the keys, and the rules that they must keep, in the order in which its
server checks them.

A sentence about a broken rule is Megatron-LM's own, blanks included: clients compare and print these sentences. Two
rules about types differ on purpose: `true` and `false` are never numbers, and an integer stands for a float.
"""

from dataclasses import dataclass
from typing import Any

from dtgpt.inference.options import OPTIONS
from dtgpt.util.errors import UserError

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


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """The keys of a request that keeps the rules, by their names there."""

    prompts: list[str]
    tokens_to_generate: int  # 0: score the prompts
    logprobs: bool
    temperature: float
    top_k: int  # 0: all tokens
    top_p: float  # 0: all tokens
    top_p_decay: float
    top_p_bound: float
    add_BOS: bool
    stop_on_double_eol: bool
    stop_on_eol: bool
    prevent_newline_after_colon: bool
    random_seed: int | None
    no_log: bool
    beam_width: int | None  # None: no beam search
    stop_token: int | None  # of beams alone; None: the end of text
    length_penalty: float


def read_request(body: Any) -> ApiRequest:
    """Return the request of a JSON value; unknown keys are ignored. Raise UserError with the sentence of the first rule
    that the value breaks."""
    prompts = _read_prompts(body)
    new_tokens = _integer(body, "tokens_to_generate", 64, "tokens_to_generate must be an integer greater than 0")
    _require(new_tokens >= 0, "tokens_to_generate must be an integer greater than or equal to 0")
    logprobs = _switch(body, "logprobs")
    _require(logprobs or new_tokens > 0, "tokens_to_generate=0 implies logprobs should be True")
    filters = _read_filters(body)
    add_bos = _switch(body, "add_BOS")
    _require(all(isinstance(prompt, str) for prompt in prompts), NOT_TEXTS)  # its server fails here
    _require(add_bos or all(prompts), "Empty prompts require add_BOS=true")
    switches = {key: _switch(body, key) for key in ("stop_on_double_eol", "stop_on_eol", "prevent_newline_after_colon")}
    seed = _read_seed(body)
    no_log = _switch(body, "no_log")
    return ApiRequest(
        prompts=prompts, tokens_to_generate=new_tokens, logprobs=logprobs, add_BOS=add_bos, random_seed=seed,
        no_log=no_log, **filters, **switches, **_read_search(body, len(prompts)),
    )  # fmt: skip


def _read_prompts(body: Any) -> list[Any]:
    _require(isinstance(body, dict) and "prompts" in body, "prompts argument required")
    _require("max_len" not in body, "max_len is no longer used.  Replace with tokens_to_generate")
    _require("sentences" not in body, "sentences is no longer used.  Replace with prompts")
    prompts = body["prompts"]
    _require(isinstance(prompts, list), NOT_TEXTS)
    _require(len(prompts) > 0, "prompts is empty")
    _require(len(prompts) <= MOST_PROMPTS, f"Maximum number of prompts is {MOST_PROMPTS}")
    return prompts


def _read_filters(body: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that shape the distribution."""
    rule = f"temperature must be a positive number less than or equal to {HIGHEST_TEMPERATURE}"
    temperature = _number(body, "temperature", 1.0, rule)
    _require(0 < temperature <= HIGHEST_TEMPERATURE, rule)

    rule = f"equal to or greater than 0 and less than or equal to {MOST_TOP_K}"
    top_k = _integer(body, "top_k", 0, f"top_k must be an integer {rule}")
    _require(0 <= top_k <= MOST_TOP_K, f"top_k must be {rule}")

    top_p = _number(body, "top_p", 0.0, "top_p must be a positive float less than or equal to 1.0")
    _require(not (top_p > 0 and top_k > 0), "cannot set both top-k and top-p samplings.")
    _require(0 <= top_p <= 1, "top_p must be less than or equal to 1.0")

    decay = _number(body, "top_p_decay", 0.0, "top_p_decay must be a positive float less than or equal to 1.0")
    _require(top_p > 0 or "top_p_decay" not in body, "top_p_decay cannot be set without top_p")
    _require(0 <= decay <= 1, "top_p_decay must be less than or equal to 1.0")

    bound = _number(body, "top_p_bound", 0.0, "top_p_bound must be a positive float less than or equal to top_p")
    _require(top_p > 0 or "top_p_bound" not in body, "top_p_bound cannot be set without top_p")
    _require(0 < bound <= top_p or "top_p_bound" not in body, "top_p_bound must be greater than 0 and less than top_p")
    return {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "top_p_decay": decay, "top_p_bound": bound,
    }  # fmt: skip


def _read_seed(body: dict[str, Any]) -> int | None:
    if "random_seed" not in body:
        return None
    seed = _integer(body, "random_seed", 0, "random_seed must be integer")
    _require(seed >= 0, "random_seed must be a positive integer")
    _require(seed <= LARGEST_SEED, f"random_seed is too large; use 0 to {LARGEST_SEED}")
    return seed


def _read_search(body: dict[str, Any], prompts: int) -> dict[str, Any]:
    """Return the keys of beams. `prompts`: their number."""
    width = stop = None
    if "beam_width" in body:
        width = _integer(body, "beam_width", 1, "beam_width must be integer")
        _require(width >= 1, "beam_width must be an integer > 1")
        _require(prompts == 1, "When doing beam_search, batch size must be 1")
    if "stop_token" in body:
        stop = _integer(body, "stop_token", 0, "stop_token must be an integer")
    penalty = _number(body, "length_penalty", 1.0, "length_penalty must be a float")
    return {"beam_width": width, "stop_token": stop, "length_penalty": penalty}


def _require(kept: bool, sentence: str) -> None:
    if not kept:
        raise UserError(sentence)


def _switch(body: dict[str, Any], key: str) -> bool:
    value = body.get(key, False)
    _require(isinstance(value, bool), f"{key} must be a boolean value")
    return value


def _integer(body: dict[str, Any], key: str, default: int, sentence: str) -> int:
    value = body.get(key, default)
    _require(type(value) is int, sentence)
    return value


def _number(body: dict[str, Any], key: str, default: float, sentence: str) -> float:
    value = body.get(key, default)
    _require(type(value) in (int, float), sentence)
    return value

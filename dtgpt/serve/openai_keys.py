"""The keys of a request to OpenAI's completions: the type, the range and the default of each."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dtgpt.inference.options import MOST_SEQUENCES, spells_id
from dtgpt.inference.sampling import BIAS, HIGHEST_TEMPERATURE, LARGEST_TOP_K, PENALTY
from dtgpt.inference.text import check_stop_strings
from dtgpt.ops.sampling.sequences import MOST_BIASES, MOST_NGRAM, MOST_STOPS
from dtgpt.serve.problems import HttpProblem, bad_request
from dtgpt.util.errors import UserError, shown, shown_name

MOST_LOGPROBS = 5  # as OpenAI's API
ELSEWHERE = {  # names that other programs have for a key
    "max_new_tokens": "max_tokens", "tokens_to_generate": "max_tokens", "max_completion_tokens": "max_tokens",
    "num_return_sequences": "n", "random_seed": "seed", "stop_strings": "stop", "until": "stop", "prompts": "prompt",
    "top_logprobs": "logprobs", "min_new_tokens": "min_tokens", "eos_token_id": "stop_token_ids",
}  # fmt: skip

Reader = Callable[[str, Any], Any]  # (key, value) -> value; raises HttpProblem


class Key(NamedTuple):
    """A key that a request may have."""

    default: Any  # where the key is missing or null
    read: Reader


def read_keys(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every known key. Raise HttpProblem 400 for a value that a key cannot have, and for a key that
    is unknown: ignoring it would give another text than its sender expects."""
    for name in body:
        if name not in KEYS and body[name] is not None:
            near = difflib.get_close_matches(ELSEWHERE.get(name, name)[:99], KEYS, n=1)
            remedy = f"did you mean {near[0]}?" if near else "leave it out"
            raise HttpProblem(400, f"there is no key {shown(name)}; {remedy}", shown_name(name))
    return {
        name: key.default if body.get(name) is None else key.read(name, body[name]) for name, key in KEYS.items()
    }  # fmt: skip


def wrong(name: str, value: Any, rule: str) -> HttpProblem:
    """Return the problem of a value that breaks the rule of its key."""
    return HttpProblem(400, f"{name}={shown(value)} is not valid; use {rule}", name)


def whole(least: int, most: int) -> Reader:
    """Return a reader of whole numbers. A bool is not a number."""

    def read(name: str, value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise wrong(name, value, f"a whole number from {least} to {most}")
        return value

    return read


def number(least: float, most: float) -> Reader:
    """Return a reader of numbers. A whole number stands for a float."""

    def read(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not least <= value <= most:
            raise wrong(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    return read


def only(neutral: Any) -> Reader:
    """Return a reader of a key that this server does not support and that changes nothing at its `neutral` value."""

    def read(name: str, value: Any) -> Any:
        if (type(value) is bool) != (type(neutral) is bool) or value != neutral:
            raise HttpProblem(400, f"this server does not support {name}={shown(value)}; leave it out", name)
        return value

    return read


def read_switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def read_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(name, value, "a text")
    return value


def read_any(name: str, value: Any) -> Any:
    return value


def read_stop(name: str, value: Any) -> tuple[str, ...]:
    """Return one stop string or several as a tuple."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise wrong(name, value, "a text or a list of texts")
    try:
        check_stop_strings(strings)
    except UserError as error:
        raise bad_request(error, name) from None
    return tuple(strings)


def read_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(i) is int for i in value) or len(value) > MOST_STOPS:
        raise wrong(name, value, f"a list of up to {MOST_STOPS} ids")
    return tuple(value)


def read_bias(name: str, value: Any) -> dict[int, float]:
    """Return numbers by id, which is a text in JSON."""
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise wrong(name, value, f"an object of up to {MOST_BIASES} ids with a number each")
    found = {}
    for key, bias in value.items():
        if not spells_id(key):
            raise wrong(f"the id {shown_name(key)} of {name}", bias, 'ids of tokens, such as "50256"')
        found[int(key)] = number(-BIAS, BIAS)(name, bias)
    return found


def read_stream_options(name: str, value: Any) -> bool:
    """Return whether the usage is wanted at the end of a stream."""
    if not isinstance(value, dict):
        raise wrong(name, value, 'an object, such as {"include_usage": true}')
    for key, switch in value.items():
        if key not in ("include_usage", "include_obfuscation"):  # the second pads events, which changes no text
            raise HttpProblem(400, f"there is no option {shown_name(key)} of a stream; use include_usage", name)
        read_switch(f"{name}.{key}", switch)
    return value.get("include_usage", False)


OFF = Key(False, read_switch)
KEYS = {
    "model": Key(None, read_text),
    "prompt": Key(None, read_any),  # see `openai_prompts`
    "max_tokens": Key(None, whole(0, 2**31 - 1)),
    "temperature": Key(1.0, number(0, HIGHEST_TEMPERATURE)),
    "top_p": Key(1.0, number(0, 1)),
    "n": Key(1, whole(1, MOST_SEQUENCES)),
    "best_of": Key(None, whole(1, MOST_SEQUENCES)),
    "seed": Key(None, whole(-(2**63), 2**64 - 1)),
    "stop": Key((), read_stop),
    "echo": OFF,
    "logprobs": Key(None, whole(0, MOST_LOGPROBS)),
    "stream": OFF,
    "stream_options": Key(None, read_stream_options),
    "frequency_penalty": Key(0.0, number(-PENALTY, PENALTY)),
    "presence_penalty": Key(0.0, number(-PENALTY, PENALTY)),
    "logit_bias": Key({}, read_bias),
    "suffix": Key("", only("")),
    "user": Key(None, read_any),
    # vLLM's
    "top_k": Key(0, whole(-1, LARGEST_TOP_K)),
    "min_tokens": Key(0, whole(0, 2**31 - 1)),
    "stop_token_ids": Key((), read_ids),
    "ignore_eos": OFF,
    "return_token_ids": OFF,
    "min_p": Key(0.0, only(0)),
    "repetition_penalty": Key(1.0, only(1)),
    "use_beam_search": Key(False, only(False)),
    "skip_special_tokens": Key(True, only(True)),
    "include_stop_str_in_output": Key(False, only(False)),
    # transformers' and Megatron-LM's, as `dtgpt generate` has them
    "do_sample": Key(True, read_switch),
    "no_repeat_ngram_size": Key(0, whole(0, MOST_NGRAM)),
    "top_p_decay": Key(0.0, number(0, 1)),
    "top_p_bound": Key(0.0, number(0, 1)),
    "stop_on_eol": OFF,
    "stop_on_double_eol": OFF,
    "prevent_newline_after_colon": OFF,
}

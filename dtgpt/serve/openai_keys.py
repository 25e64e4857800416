"""The keys of a request to OpenAI's completions: those of the options that `dtgpt.inference` declares, and those of
this API alone."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dtgpt.inference.options import OPTIONS, Options, check_whole, declared, plain
from dtgpt.serve.problems import HttpProblem, bad_request
from dtgpt.util.errors import UserError, shown, shown_name

MOST_LOGPROBS = 5  # as OpenAI's API
ELSEWHERE = {  # names that other programs have for a key
    "max_new_tokens": "max_tokens", "tokens_to_generate": "max_tokens", "max_completion_tokens": "max_tokens",
    "num_return_sequences": "n", "random_seed": "seed", "stop_strings": "stop", "until": "stop", "prompts": "prompt",
    "top_logprobs": "logprobs", "min_new_tokens": "min_tokens", "eos_token_id": "stop_token_ids",
}  # fmt: skip
NAMED = {  # options with another name there
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
}
OPTION_KEYS = {
    NAMED.get(name, name): option
    for name, option in declared(Options).items()
    if name not in ("ends", "top_logprobs", "prompt_logprobs")
}

Reader = Callable[[str, Any], Any]  # (key, value) -> value; raises UserError or HttpProblem


class RequestKey(NamedTuple):
    """A key that a request may have."""

    default: Any  # where the key is missing or null
    read: Reader


def read_keys(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every key of this API, and of the options that are given. Raise HttpProblem 400 for a value
    that a key cannot have, and for a key that is unknown: ignoring it would give another text than its sender expects.
    """
    for name in body:
        if name not in KEYS and name not in OPTION_KEYS and body[name] is not None:
            near = difflib.get_close_matches(ELSEWHERE.get(name, name)[:99], {**KEYS, **OPTION_KEYS}, n=1)
            remedy = f"did you mean {near[0]}?" if near else "leave it out"
            raise HttpProblem(400, f"there is no key {shown(name)}; {remedy}", shown_name(name))
    found = {name: key.default for name, key in KEYS.items()}
    for name, value in body.items():
        if value is None:
            continue
        try:
            found[name] = KEYS[name].read(name, value) if name in KEYS else read_option(name, value)
        except UserError as error:
            raise bad_request(error, name) from None
    return found


def read_option(name: str, value: Any) -> Any:
    """Return the value of the option of this key, in the bounds of any model."""
    option = OPTION_KEYS[name]
    if name == "top_k" and value == -1:  # vLLM's name of no limit
        return option.default
    found = value if name == "stop_token_ids" and type(value) is int else plain(option.name, value)
    option.check(found, name=name)
    return found


def only(neutral: Any) -> Reader:
    """Return a reader of a key that this server does not support and that changes nothing at its `neutral` value."""

    def read(name: str, value: Any) -> Any:
        if (type(value) is bool) != (type(neutral) is bool) or value != neutral:
            raise UserError(f"this server does not support {name}={shown(value)}; leave it out")
        return value

    return read


def read_switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise HttpProblem(400, f"{name}={shown(value)} is not a switch; use true or false", name)
    return value


def read_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise HttpProblem(400, f"{name}={shown(value)} is not a text; use one", name)
    return value


def read_any(name: str, value: Any) -> Any:
    return value


def read_logprobs(name: str, value: Any) -> int:
    check_whole(name, value, 0, MOST_LOGPROBS)
    return value


def read_best_of(name: str, value: Any) -> int:
    OPTIONS["num_return_sequences"].check(value, name=name)
    return value


def read_stream_options(name: str, value: Any) -> bool:
    """Return whether the usage is wanted at the end of a stream."""
    if not isinstance(value, dict):
        raise UserError(f'{name}={shown(value)} is not an object; use one, such as {{"include_usage": true}}')
    for key, switch in value.items():
        if key not in ("include_usage", "include_obfuscation"):  # the second pads events, which changes no text
            raise UserError(f"there is no option {shown_name(key)} of a stream; use include_usage")
        read_switch(f"{name}.{key}", switch)
    return value.get("include_usage", False)


def read_metadata(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f'{name}={shown(value)} is not an object; use one, such as {{"user": "17"}}')
    return value


OFF = RequestKey(False, read_switch)
NOTE = RequestKey(None, read_text)  # about a request, which changes nothing of its answer
KEYS = {
    "model": RequestKey(None, read_text),
    "prompt": RequestKey(None, read_any),  # see `openai_request`
    "best_of": RequestKey(None, read_best_of),
    "echo": OFF,
    "logprobs": RequestKey(None, read_logprobs),
    "stream": OFF,
    "stream_options": RequestKey(None, read_stream_options),
    "suffix": RequestKey("", only("")),
    "user": RequestKey(None, read_any),
    "metadata": RequestKey(None, read_metadata),
    "safety_identifier": NOTE,
    "service_tier": NOTE,
    "prompt_cache_key": NOTE,
    "prompt_cache_retention": NOTE,
    "prediction": RequestKey(None, read_metadata),  # of a text, which is generated no otherwise
    "parallel_tool_calls": OFF,  # of tools, which there are none
    "store": RequestKey(False, only(False)),  # nothing is stored
    "verbosity": RequestKey("medium", only("medium")),
    # vLLM's
    "ignore_eos": OFF,
    "return_token_ids": OFF,
    "repetition_penalty": RequestKey(1.0, only(1)),
    "use_beam_search": RequestKey(False, only(False)),
    "skip_special_tokens": RequestKey(False, only(False)),  # texts have the names of all but the end of text
    "include_stop_str_in_output": RequestKey(False, only(False)),
}

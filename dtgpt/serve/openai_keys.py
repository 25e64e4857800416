"""The keys of a request to OpenAI's completions.

A key that the server does not know is refused: to ignore it would give another text than its sender expects. Keys of
the options that `dtgpt.inference` declares are checked by these; those of this API alone stand in the table `KEYS`.
"""

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from dtgpt.inference.base_options import MOST_SEQUENCES, check_whole
from dtgpt.inference.options import OPTIONS
from dtgpt.serve.problems import HttpProblem, bad_request
from dtgpt.util.errors import UserError, shown, shown_name

MOST_LOGPROBS = 5  # as OpenAI's API
ELSEWHERE = {  # names that other programs have for a key
    "max_new_tokens": "max_tokens",
    "tokens_to_generate": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "stop_strings": "stop",
    "until": "stop",
    "prompts": "prompt",
    "top_logprobs": "logprobs",
    "min_new_tokens": "min_tokens",
    "eos_token_id": "stop_token_ids",
}
NAMED = {  # options with another name there
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
}
WITHOUT = "ends", "top_logprobs", "prompt_logprobs", "num_beams", "length_penalty", "early_stopping"
OPTION_KEYS = {NAMED.get(name, name): option for name, option in OPTIONS.items() if name not in WITHOUT}


class Kind(NamedTuple):
    """What values of a key are."""

    type: Any
    rule: str = ""  # said of another value


SWITCH = Kind(bool, "is not a switch; use true or false")
TEXT = Kind(str, "is not a text; use one")
OBJECT = Kind(dict, 'is not an object; use one, such as {"user": "17"}')
STREAM_OPTIONS = Kind(dict, 'is not an object; use one, such as {"include_usage": true}')
ANY = Kind(object)


class RequestKey(NamedTuple):
    """A key of this API that is no option of generation."""

    kind: Kind
    default: Any = None  # where the key is missing or null
    bounds: tuple[int, int] | None = None  # of whole numbers
    is_supported: bool = True  # else it may only have its default, with which it changes nothing


KEYS = {
    "model": RequestKey(ANY),  # read by `openai_request`, as the prompt
    "prompt": RequestKey(ANY),
    "best_of": RequestKey(ANY, bounds=(1, MOST_SEQUENCES)),
    "echo": RequestKey(SWITCH, False),
    "logprobs": RequestKey(ANY, bounds=(0, MOST_LOGPROBS)),
    "stream": RequestKey(SWITCH, False),
    "stream_options": RequestKey(STREAM_OPTIONS),
    "suffix": RequestKey(ANY, "", is_supported=False),
    # About a request, which change nothing of its answer:
    "user": RequestKey(ANY),
    "metadata": RequestKey(OBJECT),
    "safety_identifier": RequestKey(TEXT),
    "service_tier": RequestKey(TEXT),
    "prompt_cache_key": RequestKey(TEXT),
    "prompt_cache_retention": RequestKey(TEXT),
    "prediction": RequestKey(OBJECT),  # of a text, which is generated no otherwise
    "parallel_tool_calls": RequestKey(SWITCH, False),  # of tools, which only chats have
    "store": RequestKey(ANY, False, is_supported=False),  # nothing is stored
    "verbosity": RequestKey(ANY, "medium", is_supported=False),
    # vLLM's
    "ignore_eos": RequestKey(SWITCH, False),
    "return_token_ids": RequestKey(SWITCH, False),
    "use_beam_search": RequestKey(ANY, False, is_supported=False),
    "skip_special_tokens": RequestKey(ANY, False, is_supported=False),  # texts have the names of all but the end
    "include_stop_str_in_output": RequestKey(ANY, False, is_supported=False),
}


def read_keys(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every key of this API, and of the options that are given. Raise HttpProblem 400 for a value
    that a key cannot have, and for a key that is unknown."""
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
            if name in KEYS:
                check_key(name, value, KEYS[name])
                found[name] = value
            else:
                found[name] = read_option(name, value)
        except UserError as error:
            raise bad_request(error, name) from None
    return found


def check_key(name: str, value: Any, key: RequestKey) -> None:
    """Raise UserError, or HttpProblem, for a value that a key of this API cannot have."""
    read_kind(name, value, key.kind)
    if key.bounds is not None:
        check_whole(name, value, *key.bounds)
    # True equals 1, and is another value.
    if not key.is_supported and (value != key.default or isinstance(value, bool) != isinstance(key.default, bool)):
        raise UserError(f"this server does not support {name}={shown(value)}; leave it out")
    for inner in value if key.kind is STREAM_OPTIONS else ():
        if inner not in ("include_usage", "include_obfuscation"):  # the second pads events, which changes no text
            raise UserError(f"there is no option {shown_name(inner)} of a stream; use include_usage")
        read_kind(f"{name}.{inner}", value[inner], SWITCH)


def read_kind(name: str, value: Any, kind: Kind) -> Any:
    """Return the value of a key. Raise HttpProblem 400 for one of another kind."""
    if not isinstance(value, kind.type):
        raise HttpProblem(400, f"{name}={shown(value)} {kind.rule}", name)
    return value


def read_option(name: str, value: Any) -> Any:
    """Return the value of the option of this key, in the bounds of any model. Raise UserError where it is wrong."""
    option = OPTION_KEYS[name]
    if name == "top_k" and value == -1:  # vLLM's name of no limit
        return option.default
    found = value if name == "stop_token_ids" and type(value) is int else option.read(value)
    option.check(found, name=name)
    return found

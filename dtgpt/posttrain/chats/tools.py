"""Tools of a chat in OpenAI's form: the functions that a model may call, its calls, and their results.

`"tools"` of a row or a request are `{"type": "function", "function": {"name", "description", "parameters"}}`; those of
an answer, `"tool_calls"`, are `{"id", "type": "function", "function": {"name", "arguments"}}`, the arguments an object
or its JSON; a message of the role tool has a result. A template gets all of them, arguments as objects.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from dtgpt.posttrain.chats.template import ChatError, Message
from dtgpt.util.errors import shown

TOOLS, CALLS, ROLE = "tools", "tool_calls", "tool"


def read_tools(given: Any) -> list[dict[str, Any]]:
    """Return the tools of a chat, which may be JSON, as in tables that have no lists; none where there are none. Raises
    ChatError."""
    if isinstance(given, str):
        given = _parsed(given, "tools", "a list")
    if not given:
        return []
    if not isinstance(given, list):
        raise ChatError(f"tools={shown(given)} is not a list; give one of functions")
    for number, tool in enumerate(given):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            example = '{"type": "function", "function": {"name": "f", "parameters": {}}}'
            raise ChatError(f"tool {number} is {shown(tool)}, which is no function with a name; give such as {example}")
        if tool.get("type", "function") != "function":
            raise ChatError(f"tool {number} has the type {shown(tool['type'])}; use function")
    return given


def read_calls(number: int, given: Any) -> list[dict[str, Any]]:
    """Return the calls of message `number`. Raises ChatError."""
    if isinstance(given, str):
        given = _parsed(given, f"tool_calls of message {number}", "a list")
    if not isinstance(given, list):
        raise ChatError(f"message {number} has tool_calls={shown(given)}, which is not a list; give one of calls")
    return [_call(number, call) for call in given]


def _call(number: int, given: Any) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        example = '{"type": "function", "function": {"name": "f", "arguments": {}}}'
        raise ChatError(f"message {number} has the call {shown(given)}, of no function; give such as {example}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments or "{}", f"arguments of a call in message {number}", "an object")
    if not isinstance(arguments, dict | None):
        raise ChatError(f"message {number} calls with arguments={shown(arguments)}; give an object, or its JSON")
    return {**given, "type": "function", "function": {**function, "arguments": arguments or {}}}


def _parsed(text: str, what: str, form: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ChatError(f"{what}={shown(text)} is not JSON; give {form}") from None


def check_tools(template: str, messages: Iterable[Message], tools: Iterable[Mapping[str, Any]]) -> None:
    """Raise ChatError where a template does not write the tools of a chat, or its calls."""
    named = set(re.findall(r"\w+", template))
    calls = (message.get(CALLS) for message in messages)
    for name, there in ((TOOLS, any(True for _ in tools)), (CALLS, any(calls))):
        if there and name not in named:
            raise ChatError(f"the chat template writes no {name}; leave them out, or use another template")


def forms(content: str) -> tuple[str, str]:
    """Return a result as templates write it: as it is, or as JSON has texts."""
    return content, json.dumps(content, ensure_ascii=False)[1:-1]

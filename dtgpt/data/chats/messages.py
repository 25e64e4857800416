"""Chats in several forms as messages, which a template takes.

OpenAI's: `{"messages": [{"role", "content"}, ...]}`, where an answer may have `"weight": 0`, so that it is not trained
on. ShareGPT's: `{"conversations": [{"from", "value"}, ...]}`, with weights, too. Pairs: `{"prompt", "completion"}`,
texts or lists of messages, of which only answers in the completion are trained on. In each form `"system"` may have a
text that is the first message.
"""

from typing import Any

from dtgpt.data.chats.template import ChatError, Message
from dtgpt.data.prepare.documents import paired
from dtgpt.util.errors import shown

ROLES = ("system", "developer", "user", "assistant")
FROM = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
        "assistant": "assistant", "system": "system"}  # fmt: skip
TOOLS = ("tool_calls", "function_call", "tools", "functions", "tool_call_id")
FORMS = "messages (OpenAI), conversations (ShareGPT), or prompt and completion"


def read_chat(fields: dict[str, Any]) -> list[Message]:
    """Return the messages of a chat to train on. Raises ChatError where it is none: of another form, with tools, with a
    role or an answer that is missing or empty."""
    messages = read_messages(with_system(fields, _messages_in(fields)))
    if any(fields.get(name) for name in TOOLS):
        raise _with_tools()
    if not any(message["role"] == "assistant" for message in messages):
        raise ChatError("the chat has no answer of the assistant; add one, or leave the chat out")
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and not message["content"].strip():
            raise ChatError(f"message {number} is an empty answer; give it a text, or leave the chat out")
    return messages


def read_messages(given: Any) -> list[Message]:
    """Return the messages in OpenAI's form, with their content as text. Raises ChatError."""
    if not isinstance(given, list) or not given:
        raise ChatError(f"{shown(given)} is not a list of messages; give some, each with a role and a content")
    return [_message(number, message) for number, message in enumerate(given)]


def with_system(fields: dict[str, Any], messages: Any) -> Any:
    """Return messages after the instruction that `fields` may have apart from them. Raises ChatError where they have
    another one."""
    text = fields.get("system")
    if not isinstance(text, str) or not text.strip() or not isinstance(messages, list):
        return messages
    own = [
        message.get("content") for message in messages if isinstance(message, dict) and message.get("role") == "system"
    ]
    if own and own[0] != text:
        raise ChatError(f"the chat has a message of the role system and system={shown(text)}; leave one out")
    return messages if own else [{"role": "system", "content": text}, *messages]


def _messages_in(fields: dict[str, Any]) -> Any:
    if "messages" in fields:
        return fields["messages"]
    if "conversations" in fields:
        return _from_sharegpt(fields["conversations"])
    if "prompt" in fields and "completion" in fields:
        prompt, completion = (
            value if isinstance(value, list) else [{"role": role, "content": value}]
            for role, value in (("user", fields["prompt"]), ("assistant", fields["completion"]))
        )
        if not any(_is_answer(message) for message in completion):
            raise ChatError("the completion has no answer of the assistant; add one, or leave the chat out")
        return [message | {"weight": 0} if _is_answer(message) else message for message in prompt] + completion
    raise ChatError(f"there is no chat under the keys {shown(list(fields)[:5])}; give {FORMS}")


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _from_sharegpt(given: Any) -> Any:
    if not isinstance(given, list):
        return given
    messages = []
    for number, turn in enumerate(given):
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
            return given  # OpenAI's form under ShareGPT's name, or neither
        if turn["from"] not in FROM:
            if "tool" in turn["from"] or "function" in turn["from"] or turn["from"] == "observation":
                raise _with_tools()
            raise ChatError(f"message {number} is from {shown(turn['from'])}; use one of {', '.join(FROM)}")
        message = {"role": FROM[turn["from"]], "content": turn.get("value")}
        counts = message["role"] == "assistant" or turn.get("weight") not in (None, 0)
        messages.append(message | {"weight": turn.get("weight")} if counts else message)
    return messages


def _message(number: int, given: Any) -> Message:
    if not isinstance(given, dict):
        raise ChatError(f"message {number} is {shown(given)}; give an object with a role and a content")
    role, content = given.get("role"), given.get("content")
    if role in ("tool", "function") or any(given.get(name) for name in TOOLS):
        raise _with_tools()
    if role not in ROLES:
        raise ChatError(f"message {number} has the role {shown(role)}; use one of {', '.join(ROLES)}")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            raise ChatError(f"message {number} has parts that are not text; leave images and other media out")
        content = "".join(map(str, texts))
    if not isinstance(content, str):
        raise ChatError(f"message {number} has the content {shown(content)}; give it a text")
    weight = given.get("weight")
    if weight is not None and (type(weight) not in (int, float) or weight not in (0, 1) or role != "assistant"):
        raise ChatError(f"message {number} has weight={shown(weight)}; only answers have one, which is 0 or 1")
    message = {"role": role, "content": paired(content)}
    return message if weight is None else message | {"weight": int(weight)}


def _with_tools() -> ChatError:
    return ChatError("the chat uses tools, which are not supported; leave it out")

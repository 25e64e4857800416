"""Chats in several forms as messages, which a template takes.

OpenAI's: `{"messages": [{"role", "content"}, ...]}`, where an answer may have `"weight": 0`, or another mark of MARKS,
so that it is not trained on. ShareGPT's: `{"conversations": [{"from", "value"}, ...]}`, with marks, too. Pairs:
`{"prompt", "completion"}`, texts or lists of messages, of which only answers in the completion are trained on.
Alpaca's: `{"instruction", "input", "output"}`, texts, of which the first two are one message, a line each; `"history"`
may have pairs of such a message and its answer that came before. In each form `"system"` may have a text that is the
first message, and `"chat_template_kwargs"` more variables of the template.

Rows may have `"tools"`, messages `"tool_calls"` and the role tool, which `tools.py` reads.

A template gets messages with all that they have: what an answer thinks, names and whatever else. A value that is null
is absent, as where a table has a column for it.
"""

import json
from collections.abc import Mapping
from itertools import cycle
from typing import Any, NamedTuple

from dtgpt.data.text import paired
from dtgpt.posttrain.chats.template import ChatError, Message
from dtgpt.posttrain.chats.tools import CALLS, ROLE, TOOLS, read_calls, read_tools
from dtgpt.util.errors import shown

ROLES = ("system", "developer", "user", "assistant", ROLE)
FROM = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": ROLE,
    "observation": ROLE,
}
FUNCTIONS = ("function_call", "functions")  # an older form of tools
# Marks of several libraries on an answer: the value with which it counts; the other one keeps it out of the loss.
MARKS = {
    "weight": True,
    "training": True,
    "train": True,
    "trainable": True,
    "train_on_turn": True,
    "loss": True,
    "loss_mask": True,
    "masked": False,
}
UNREAD_MARKS = ("training_detail", "train_detail", "mask", "ignore")  # of parts of an answer, or of either meaning
THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"  # around what an answer thinks, in its content
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # of an answer; templates read the first two
ARGUMENTS = "chat_template_kwargs"
USED = ("system", ARGUMENTS, TOOLS, *FUNCTIONS, *MARKS, *UNREAD_MARKS)  # keys of a row beside those of its messages
# What renders a chat has these arguments of its own: they are no variables of a template, or say what dtgpt decides.
RESERVED = (
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)
FORMS = "messages (OpenAI), conversations (ShareGPT), prompt and completion, or instruction and output (Alpaca)"


class Chat(NamedTuple):
    """A chat to train on. `first`: the number of the first message that may count, after a prompt; none may where it is
    the number of all messages. `arguments`: variables of the template beside the messages. `used`: keys of the row that
    are read."""

    messages: list[Message]
    first: int
    arguments: dict[str, Any]
    used: frozenset[str]


def read_chat(fields: dict[str, Any]) -> Chat:
    """Return the chat in a row. Raises ChatError where it is none: of another form, with a role or an answer that is
    missing or empty."""
    given, prompt, keys = _messages_in(fields)
    whole = with_system(fields, given)
    messages = read_messages(whole)
    if any(fields.get(name) for name in FUNCTIONS):
        raise with_functions()
    if not any(message["role"] == "assistant" for message in messages):
        raise ChatError("the chat has no answer of the assistant; add one, or leave the chat out")
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and not (message["content"].strip() or message.get(CALLS)):
            raise ChatError(f"message {number} is an empty answer; give it a text, or leave the chat out")
        if read_mark(f"message {number}", message) and message["role"] != "assistant":
            mark = next(name for name in MARKS if name in message)
            raise ChatError(
                f"message {number} has {mark}={shown(message[mark])}, which only answers have; leave it out"
            )
    first = prompt + len(whole) - len(given)  # with the instruction
    if read_mark("the chat", fields) is False:
        first = len(messages)
    arguments, tools = read_arguments(fields.get(ARGUMENTS)), read_tools(fields.get(TOOLS))
    return Chat(messages, first, arguments | ({TOOLS: tools} if tools else {}), frozenset({*keys, *USED}))


def read_messages(given: Any) -> list[Message]:
    """Return the messages in OpenAI's form, with their content as text, and all else as it is. Raises ChatError."""
    if not isinstance(given, list) or not given:
        raise ChatError(f"{shown(given)} is not a list of messages; give some, each with a role and a content")
    return [_message(number, message) for number, message in enumerate(given)]


def read_mark(what: str, fields: Mapping[str, Any]) -> bool | None:
    """Return whether the loss of what has these fields counts, by their marks; None without one. Raises ChatError for a
    mark that has another value than yes or no, and where two differ."""
    if unread := next((name for name in UNREAD_MARKS if fields.get(name) not in (None, [])), None):
        raise ChatError(
            f"{what} has {unread}={shown(fields[unread])}, a mark that is not read; leave it out, or mark whole "
            "answers by weight=0"
        )
    found = {name: fields[name] for name in MARKS if fields.get(name) is not None}
    for name, value in found.items():
        if type(value) not in (bool, int, float) or value not in (0, 1):
            raise ChatError(f"{what} has {name}={shown(value)}, a mark of whether its loss counts; use 0 or 1")
    counts = {bool(value) is MARKS[name] for name, value in found.items()}
    if len(counts) > 1:
        both = " and ".join(f"{name}={shown(value)}" for name, value in found.items())
        raise ChatError(f"{what} has {both}, of which one keeps it out of the loss and one does not; leave one out")
    return counts.pop() if counts else None


def read_arguments(given: Any) -> dict[str, Any]:
    """Return what `chat_template_kwargs` give a template beside the messages. Raises ChatError."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ChatError(f"{ARGUMENTS}={shown(given)} is not an object; give names of variables with their values")
    found = _present(given)
    if wrong := next((name for name in found if name in RESERVED), None):
        raise ChatError(f"{ARGUMENTS} has {wrong}, which is no variable of a template of its own; leave it out")
    return found


def arguments_of_words(text: str) -> dict[str, Any]:
    """Return `chat_template_kwargs` given on a command line, as JSON; none of an empty text. Raises ChatError."""
    try:
        return read_arguments(json.loads(text) if text else None)
    except ValueError:
        example = """'{"enable_thinking": false}'"""
        raise ChatError(f"--{ARGUMENTS} {shown(text)} is not JSON; give an object, such as {example}") from None


def with_system(fields: dict[str, Any], messages: Any) -> Any:
    """Return messages after the instruction that `fields` may have apart from them. Raises ChatError where it is no
    text, and where they have another one."""
    text = fields.get("system")
    if text is not None and not isinstance(text, str):
        raise ChatError(f"the chat has system={shown(text)}, which is not a text; give it one, or leave it out")
    if text is None or not text.strip() or not isinstance(messages, list):
        return messages
    own = [
        message.get("content") for message in messages if isinstance(message, dict) and message.get("role") == "system"
    ]
    if own and own[0] != text:
        raise ChatError(f"the chat has a message of the role system and system={shown(text)}; leave one out")
    return messages if own else [{"role": "system", "content": text}, *messages]


def _messages_in(fields: dict[str, Any]) -> tuple[Any, int, tuple[str, ...]]:
    """Return messages that are not checked yet, how many of them are a prompt, and the keys under which they are."""
    there = {name for name, value in fields.items() if value is not None}
    if "messages" in there:
        return fields["messages"], 0, ("messages",)
    if "conversations" in there:
        return _from_sharegpt(fields["conversations"]), 0, ("conversations",)
    if {"prompt", "completion"} <= there:
        prompt, completion = (
            value if isinstance(value, list) else [{"role": role, "content": value}]
            for role, value in (("user", fields["prompt"]), ("assistant", fields["completion"]))
        )
        if not any(_is_answer(message) for message in completion):
            raise ChatError("the completion has no answer of the assistant; add one, or leave the chat out")
        return prompt + completion, len(prompt), ("prompt", "completion")
    if {"instruction", "output"} <= there:
        return _from_alpaca(fields), 0, ("instruction", "input", "output", "history")
    raise ChatError(
        f"there is no chat under the keys {shown(list(fields)[:5])}; give {FORMS}, or name others by --chat-keys"
    )


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _from_alpaca(fields: dict[str, Any]) -> list[Message]:
    """Return the messages of a row with an instruction. Raises ChatError for one that is no text, and a history that
    is not of pairs."""
    asked = [text for text in (fields["instruction"], fields.get("input")) if text not in (None, "")]
    if not all(isinstance(text, str) for text in asked):
        raise ChatError(f"the instruction and its input are {shown(asked)}, which are not texts; give texts")
    history = fields.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise ChatError(f"the history {shown(history)} is not a list of pairs of texts; give such, or leave it out")
    turns = [text for pair in history for text in pair] + ["\n".join(asked), fields["output"]]
    return [{"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), turns, strict=False)]


def _from_sharegpt(given: Any) -> Any:
    if not isinstance(given, list):
        return given
    messages = []
    for number, turn in enumerate(given):
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
            return given  # OpenAI's form under ShareGPT's name, or neither
        if turn["from"] not in FROM:
            if "function" in turn["from"]:
                raise with_functions()
            raise ChatError(f"message {number} is from {shown(turn['from'])}; use one of {', '.join(FROM)}")
        more = {name: value for name, value in turn.items() if name not in ("from", "value")}
        messages.append(more | {"role": FROM[turn["from"]], "content": turn.get("value")})
    return messages


def _message(number: int, given: Any) -> Message:
    if not isinstance(given, dict):
        raise ChatError(f"message {number} is {shown(given)}; give an object with a role and a content")
    role, content = given.get("role"), given.get("content")
    if role == "function" or any(given.get(name) for name in FUNCTIONS):
        raise with_functions()
    calls = read_calls(number, given[CALLS]) if given.get(CALLS) else []
    if calls and role != "assistant":
        raise ChatError(f"message {number}, with the role {shown(role)}, has tool_calls, which only answers have")
    if content is None and calls:
        content = ""
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
    unread = {CALLS, *FUNCTIONS}  # which are empty, or read above
    whole = {name: value for name, value in _present(given).items() if name not in unread}
    whole |= {"role": role, "content": paired(content)} | ({CALLS: _writable(calls)} if calls else {})
    thought = next((whole[name] for name in THOUGHTS if name in whole), None)
    return whole if thought is None else {"thinking": thought, **whole, "reasoning_content": thought}


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null, with texts that can be written."""
    return {name: _writable(value) for name, value in fields.items() if value is not None}


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return paired(value)
    if isinstance(value, list):
        return [_writable(each) for each in value]
    return {name: _writable(each) for name, each in value.items()} if isinstance(value, dict) else value


def with_functions() -> ChatError:
    return ChatError("the chat uses functions, an older form of tools, which is not read; give tools and tool_calls")

"""What of a row reaches the text of its chat: fields that nothing uses, and thoughts that a template leaves out."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dtgpt.posttrain.chats.messages import ARGUMENTS, MARKS, THOUGHT_BEGIN, THOUGHT_END, THOUGHTS, Chat
from dtgpt.posttrain.chats.template import ChatError, Message, Renderer

TAGGED = re.compile(rf"(?<={THOUGHT_BEGIN})(?=\s*\S).*?(?={THOUGHT_END})", re.DOTALL)  # in the content itself
READ = {"role", "content", "tool_call_id", *MARKS, *THOUGHTS}  # fields of messages that are read, or told otherwise


class UsedFields:
    """Finds fields of rows, of their messages and of their arguments that nothing uses, as `id of rows`. Those that
    a template does not name are looked at in the first chat that has them: does its text change without them?"""

    def __init__(self, renderer: Renderer):
        self._renderer = renderer
        self._named = set(re.findall(r"\w+", renderer.template.source))
        self._seen, self._unused = set[tuple[str, str]](), set[str]()

    def see(self, fields: Mapping[str, Any], chats: Sequence[Chat]) -> None:
        """Look at a row and the chats that were made of it."""
        own = {name for name, value in fields.items() if value is not None} - chats[0].used
        self._unused |= {f"{name} of rows" for name in own}
        for chat in chats:
            names = {(name, "messages") for message in chat.messages for name in message if name not in READ}
            names |= {(name, ARGUMENTS) for name in chat.arguments}
            for name, place in names - self._seen:
                self._seen.add((name, place))
                if name not in self._named and not self._changes(chat, name, place):
                    self._unused.add(f"{name} of {place}")

    def take_unused(self) -> set[str]:
        """Return what was found since the last call."""
        found, self._unused = self._unused, set[str]()
        return found

    def _changes(self, chat: Chat, name: str, place: str) -> bool:
        """Return whether the text of a chat is another one without a field."""
        messages, arguments = chat.messages, chat.arguments
        if place == ARGUMENTS:
            arguments = _without(arguments, name)
        else:
            messages = [_without(message, name) for message in messages]
        try:
            less = self._renderer.render(messages, arguments=arguments)
        except ChatError:
            return True
        return less != self._renderer.render(chat.messages, arguments=chat.arguments)


def _without(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {other: value for other, value in fields.items() if other != name}


def find_thoughts(
    messages: Sequence[Message], wanted: Collection[int], arguments: Mapping[str, Any], renderer: Renderer
) -> list[bool]:
    """Return, for each of the wanted answers that thinks, whether the template writes what it thinks. Another text with
    a word of its own in place of each thought says so, whatever words the chat has. Raises ChatError."""
    words = {number: f"thought-{number}-of-an-answer" for number in sorted(wanted)}
    changed = [_thinking(message, words.get(number)) for number, message in enumerate(messages)]
    thinking = [number for number in words if changed[number] != messages[number]]
    if not thinking:
        return []
    text = renderer.render(changed, arguments=arguments).text
    return [words[number] in text for number in thinking]


def _thinking(message: Message, word: str | None) -> Message:
    """Return a message with a word in place of each of its thoughts; without a word as it is."""
    if word is None:
        return message
    given = {name for name in THOUGHTS if isinstance(message.get(name), str) and message[name].strip()}
    content = TAGGED.sub(word, message["content"])
    return message | dict.fromkeys(given, word) | {"content": content}

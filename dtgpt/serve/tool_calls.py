"""Calls of tools in the text of an answer, in the forms of several models, and what is said and thought beside them.

Which form a model writes, its chat template says. A part of a text is given away as soon as more text cannot change it.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from dtgpt.inference.rules.stop_strings import overlap
from dtgpt.posttrain.chats.messages import THOUGHT_END
from dtgpt.serve.thoughts import Thoughts


class ToolCall(NamedTuple):
    """A call of a function, with its arguments as JSON."""

    name: str
    arguments: str


class Parts(NamedTuple):
    """What new text adds to an answer."""

    thought: str
    said: str
    calls: list[ToolCall]


class Reader(Protocol):
    """Reads one answer as its text arrives."""

    def take(self, text: str, last: bool) -> Parts:
        """Return what new text adds. last: no more comes."""


class CallForm(Protocol):
    """Finds calls in what is said."""

    def take(self, text: str, last: bool) -> tuple[str, list[ToolCall]]: ...


def read_call(text: str) -> ToolCall | None:
    """Return the call in a JSON object with a name and arguments, or parameters; None where there is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # a model may write any depth
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON
        return ToolCall(found["name"], arguments)
    return ToolCall(found["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


class Tagged:
    """Objects in `<tool_call>` and `</tool_call>`, after a text or alone: Hermes and Qwen. What is between the tags and
    is no call stays text."""

    begin, end = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held = ""

    def take(self, text: str, last: bool) -> tuple[str, list[ToolCall]]:
        self._held += text
        said, calls = "", list[ToolCall]()
        while True:
            before, begin, rest = self._held.partition(self.begin)
            if not begin:
                break
            inside, end, after = rest.partition(self.end)
            if not end and not last:
                said, self._held = said + before.rstrip("\n"), begin + rest
                return said, calls
            call = read_call(inside)
            said += before.rstrip("\n") if call else before + begin + inside + end
            calls += [call] if call else []
            self._held = after.lstrip("\n") if call else after
        kept = 0 if last else overlap(self._held, self.begin)
        body = self._held[: len(self._held) - kept]
        shown = body if last else body.rstrip("\n")  # line ends before a call are none of the text
        said, self._held = said + shown, self._held[len(shown) :]
        return said, calls


class Whole:
    """An answer that is one object, or several with `;` between them: Llama 3. Any other answer is text."""

    mark = "<|python_tag|>"

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def take(self, text: str, last: bool) -> tuple[str, list[ToolCall]]:
        self._held += text
        begin = self._held.lstrip()
        may_call = begin.startswith(("{", self.mark)) or self.mark.startswith(begin)
        self._is_text = self._is_text or not may_call
        if not (self._is_text or last):
            return "", []
        calls = [] if self._is_text else self._calls(begin.removeprefix(self.mark).strip())
        said, self._held = "" if calls else self._held, ""
        return said, calls

    def _calls(self, text: str) -> list[ToolCall]:
        found, decoder, place = [], json.JSONDecoder(), 0
        while place < len(text):
            try:
                _, end = decoder.raw_decode(text, place)
            except (ValueError, RecursionError):
                return []
            call = read_call(text[place:end])
            if call is None:
                return []
            found.append(call)
            place = end + len(text[end:]) - len(text[end:].lstrip("; \n"))
        return found


class TagReader:
    """An answer whose thought, where it has one, comes first. `form`: of its calls; None: none are looked for."""

    def __init__(self, thoughts: Thoughts | None, form: CallForm | None):
        self._thoughts, self._form = thoughts, form

    def take(self, text: str, last: bool) -> Parts:
        thought, said = ("", text) if self._thoughts is None else self._thoughts.take(text, last)
        said, calls = (said, []) if self._form is None else self._form.take(said, last)
        return Parts(thought, said, calls)


class Channels:
    """An answer of messages in channels: GPT-OSS's harmony. What is in analysis is thought, what is in commentary to a
    function a call, all else is said. `begun`: the prompt ends within what is said."""

    message = "<|message|>"
    ends = ("<|end|>", "<|call|>", "<|return|>")
    recipient = re.compile(r"to=functions\.([\w.-]+)")

    def __init__(self, begun: bool, calls: bool):
        self._calls = calls
        self._head = "final" if begun else ""
        self._within, self._held = begun, ""

    def take(self, text: str, last: bool) -> Parts:
        self._held += text
        thought, said, calls = "", "", list[ToolCall]()
        while True:
            if not self._within:
                head, found, rest = self._held.partition(self.message)
                if not found:
                    if last and not self._held.startswith("<|"):  # no message at all: text is not lost
                        said, self._held = said + self._held, ""
                    break
                self._head, self._held, self._within = head, rest, True
            ends = sorted((place, end) for end in self.ends if (place := self._held.find(end)) >= 0)
            body = self._held[: ends[0][0]] if ends else self._held
            over = bool(ends) or last
            function = self.recipient.search(self._head) if self._calls else None
            if function is not None:
                if not over:
                    break
                calls.append(ToolCall(function[1], body.strip() or "{}"))
            else:
                shown = body if over else body[: len(body) - max(overlap(body, end) for end in self.ends)]
                thought, said = (thought + shown, said) if "analysis" in self._head else (thought, said + shown)
                body = body if over else shown
            self._held = self._held[len(body) + (len(ends[0][1]) if ends else 0) :]
            if not ends:
                break
            self._within = False
        return Parts(thought, said, calls)


def form_of(template: str) -> Callable[[], CallForm] | None:
    """Return what finds calls in the form that a chat template shows a model; None where it is none of these."""
    if Tagged.begin in template:
        return Tagged
    return Whole if Whole.mark in template or '"parameters": ' in template else None


def is_harmony(template: str) -> bool:
    """Return whether a chat template writes messages in channels."""
    return "<|channel|>" in template


def reader_of(template: str, tools: bool, thinks: bool, begun: bool) -> Callable[[], Reader] | None:
    """Return what makes a reader for an answer in the form of a chat template; None where an answer is text alone.
    tools: the request has some; thinks: the prompt ends within a thought; begun: with an answer that goes on."""
    if is_harmony(template):
        return lambda: Channels(begun, tools)
    form, has_thoughts = form_of(template) if tools else None, THOUGHT_END in template
    if form is None and not has_thoughts:
        return None
    return lambda: TagReader(Thoughts(thinks) if has_thoughts else None, form() if form else None)


def openai_call(call: ToolCall, name: str) -> dict[str, Any]:
    """Return a call in OpenAI's form. name: its id."""
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

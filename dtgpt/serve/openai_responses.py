"""OpenAI's responses, for texts: a request as one to chat completions, and its answer in the form of responses.

Nothing is stored, so that each request has the whole conversation.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from dtgpt.inference.request import Completion
from dtgpt.posttrain.chats.prompts import ChatPrompts
from dtgpt.serve.openai_answer import ENCODER, CompletionStream
from dtgpt.serve.openai_chat import ChatAnswer, read_chat_request
from dtgpt.serve.openai_request import CompletionRequest
from dtgpt.serve.problems import HttpProblem
from dtgpt.serve.service import Service
from dtgpt.util.errors import shown

RENAMED = {"max_output_tokens": "max_completion_tokens"}
NEUTRAL: dict[str, Any] = {  # keys of responses alone, and what changes nothing there
    "previous_response_id": None,
    "conversation": None,
    "background": False,
    "include": [],
    "tools": [],
    "tool_choice": "auto",
    "truncation": "disabled",
    "max_tool_calls": None,
    "prompt": None,
    "reasoning": None,
}
REMEDIES = {
    "previous_response_id": "nothing is stored here; send the whole conversation as input",
    "conversation": "nothing is stored here; send the whole conversation as input",
    "tools": "tools are for chats here; use /v1/chat/completions",
}
OWN = {"input", "instructions", "text", *RENAMED, *NEUTRAL}
PARTS = ("input_text", "output_text", "text")


def read_response_request(
    body: dict[str, Any], service: Service, prompts: Callable[[], ChatPrompts]
) -> CompletionRequest:
    """Return the request in a JSON object. Raise HttpProblem where it cannot be served."""
    for name, neutral in NEUTRAL.items():
        if body.get(name) not in (None, neutral):
            remedy = REMEDIES.get(name, "this server does not support it; leave it out")
            raise HttpProblem(400, f"{name}={shown(body[name])}: {remedy}", name)
    if body.get("n") not in (None, 1):
        raise HttpProblem(400, f"n={shown(body['n'])} is not for responses; leave it out", "n")
    chat = {name: value for name, value in body.items() if name not in OWN}
    chat |= {new: body[name] for name, new in RENAMED.items() if name in body}
    chat |= {"messages": _messages(body), "response_format": _format(body.get("text"))}
    try:
        return read_chat_request(chat, service, prompts)
    except HttpProblem as problem:
        for name, new in RENAMED.items():
            problem.message = problem.message.replace(new, name)
            problem.param = name if problem.param == new else problem.param
        problem.param = "input" if problem.param == "messages" else problem.param
        raise


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Raise HttpProblem for an input that is no text and no list of messages."""
    given, instructions = body.get("input"), body.get("instructions")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise HttpProblem(400, f"input={shown(given)} is not an input; give a text, or a list of messages", "input")
    if not isinstance(instructions, str | None):
        raise HttpProblem(400, f"instructions={shown(instructions)} is not a text; use one", "instructions")
    return [{"role": "system", "content": instructions}] * bool(instructions) + [*map(_message, items)]


def _message(item: Any) -> dict[str, Any]:
    if not isinstance(item, dict) or item.get("type") not in (None, "message"):
        raise HttpProblem(400, f"input has {shown(item)}, which is no message; leave it out", "input")
    content = item.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") in PARTS]
        if len(parts) < len(content) or not all(isinstance(part, str) for part in parts):
            raise HttpProblem(400, f"content={shown(content)} is not all text; this server takes texts alone", "input")
        content = "".join(parts)  # type: ignore[arg-type]
    return {"role": item.get("role"), "content": content}


def _format(given: Any) -> Any:
    """Return the `response_format` of a chat."""
    found = given.get("format") if isinstance(given, dict) else None
    if not isinstance(found, dict) or found.get("type") != "json_schema":
        return found
    return {"type": "json_schema", "json_schema": {name: part for name, part in found.items() if name != "type"}}


class ResponseAnswer(ChatAnswer):
    """A response with one message."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.id, self._message = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._parts: dict[str, str] = {"content": "", "reasoning_content": ""}
        self._finish: str | None = None
        self._sent = 0

    def whole(self, completions: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        found = super().whole(completions)
        (choice,) = found["choices"]
        self._take(choice["message"], choice["finish_reason"])
        return self._response(found["usage"])

    def stream(self) -> "ResponseStream":
        return ResponseStream(self)

    def event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        (choice,) = choices
        begin = b"" if self._sent else self._begin()
        self._take(choice["delta"], choice["finish_reason"])
        text = choice["delta"]["content"]
        return begin + (self._send("output_text.delta", delta=text, logprobs=[], **self._place()) if text else b"")

    def finish(self, new_tokens: int) -> bytes:
        """Return the events that end a stream."""
        text, item = self._parts["content"], self._item()
        done = self._send("output_text.done", text=text, logprobs=[], **self._place())
        done += self._send("content_part.done", part=item["content"][0], **self._place())
        done += self._send("output_item.done", item=item, output_index=0)
        response = self._response(self.usage(new_tokens))
        return done + self._send(response["status"], response=response)

    def _begin(self) -> bytes:
        response, item = self._response(None) | {"output": []}, self._item()
        begin = self._send("created", response=response) + self._send("in_progress", response=response)
        begin += self._send("output_item.added", item=item | {"content": []}, output_index=0)
        return begin + self._send("content_part.added", part=item["content"][0], **self._place())

    def _take(self, said: dict[str, Any], finish: str | None) -> None:
        for name in self._parts:
            self._parts[name] += said.get(name) or ""
        self._finish = finish

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message, "output_index": 0, "content_index": 0}

    def _status(self) -> str:
        return {None: "in_progress", "length": "incomplete"}.get(self._finish, "completed")

    def _item(self) -> dict[str, Any]:
        part = {"type": "output_text", "text": self._parts["content"], "annotations": [], "logprobs": []}
        head = {"id": self._message, "type": "message", "role": "assistant", "status": self._status()}
        thought = {name: text for name, text in self._parts.items() if name != "content" and text}
        return head | thought | {"content": [part]}

    def _response(self, usage: dict[str, int] | None) -> dict[str, Any]:
        status, counts = self._status(), None
        if usage is not None:
            counts = {"input_tokens": usage["prompt_tokens"], "input_tokens_details": {"cached_tokens": 0}}
            counts |= {"output_tokens": usage["completion_tokens"], "total_tokens": usage["total_tokens"]}
            counts |= {"output_tokens_details": {"reasoning_tokens": 0}}
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        head = {"id": self.id, "object": "response", "created_at": self._head["created"], "status": status}
        head |= {"model": self._head["model"], "output": [self._item()], "usage": counts, "incomplete_details": why}
        return head | {"error": None, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}

    def _send(self, kind: str, **fields: Any) -> bytes:
        content = {"type": f"response.{kind}", "sequence_number": self._sent, **fields}
        self._sent += 1
        return f"event: response.{kind}\ndata: {ENCODER.encode(content)}\n\n".encode()


class ResponseStream(CompletionStream):
    """The events of a response."""

    def __init__(self, answer: ResponseAnswer):
        super().__init__(answer)
        self._response = answer

    def end(self) -> bytes:
        return self._response.finish(self._new_tokens)

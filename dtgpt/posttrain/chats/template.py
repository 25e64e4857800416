"""Chats rendered by the template of a tokenizer, in a process of its own."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import finalize

from dtgpt.data.library_tokenizers.base import Span
from dtgpt.data.library_tokenizers.chat_template import ChatTemplate, template_of
from dtgpt.util.errors import UserError, shown
from dtgpt.util.shared.optional import optional_package

__all__ = ["ChatError", "ChatTemplate", "Renderer", "TooLarge", "template_of"]
SANDBOX = Path(__file__).with_name("sandbox.py")
SILENT = 30.0  # seconds after which the process has been suspended: it ends itself before
LOOK = 0.1  # seconds between two looks at whether somebody still waits
PROBE = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]

NONE: Mapping[str, Any] = {}
SHORTEN = "shorten the chat, or use another template"

Message = dict[str, Any]


class ChatError(UserError):
    """What is wrong with a chat, of which others may be right."""


class TooLarge(UserError):
    """A template takes more than it may for a chat. For a small chat it is the template that is wrong."""


@dataclass(frozen=True)
class Rendered:
    """A rendered chat, and where the blocks `{% generation %}` are in it."""

    text: str
    answers: list[Span]


def nobody_leaves() -> bool:
    return False


class Renderer:
    """Renders chats by a template, in a process that cannot take more time, memory or files than `sandbox` allows. Any
    thread may use it. Raises UserError where Jinja is missing, or the template is not valid."""

    def __init__(self, template: ChatTemplate):
        optional_package("jinja2", "a chat template", extra="chat")
        self.template = template
        self._lock = Lock()
        self._process: subprocess.Popen | None = None
        with self._lock:
            self._start()

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        arguments: Mapping[str, Any] = NONE,
        left: Callable[[], bool] = nobody_leaves,
    ) -> Rendered:
        """Return a chat as text; with the beginning of an answer where a prompt is wanted. arguments: variables of the
        template beside the messages. Raises UserError."""
        return self.render_each([(messages, add_generation_prompt)], arguments, left)[0]

    def render_each(
        self,
        chats: Sequence[tuple[Sequence[Message], bool]],
        arguments: Mapping[str, Any] = NONE,
        left: Callable[[], bool] = nobody_leaves,
    ) -> list[Rendered]:
        """Return several chats, each with whether the beginning of an answer follows. `left`: whether nobody waits for
        them any more, which ends the process. Raises UserError."""
        own = {"tools": None, "documents": None, **arguments}
        asked = [own | {"messages": list(messages), "add_generation_prompt": prompt} for messages, prompt in chats]
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._start()
            found = self._ask(asked, left)["found"]
        return [Rendered(text, [(begin, end) for begin, end in spans]) for text, spans in found]

    def close(self) -> None:
        """End the process."""
        self._process = None
        self._end()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair()
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(SANDBOX)],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env=kept | {"PYTHONIOENCODING": "utf-8"},
                start_new_session=True,  # ^C in a terminal is not for it
            )
        self._end = finalize(self, end_process, self._process, self._channel)
        self.marks_answers = self._ask({"template": self.template.source, "tokens": self.template.tokens})["blocks"]

    def _ask(self, asked: Any, left: Callable[[], bool] = nobody_leaves) -> dict[str, Any]:
        line = self._exchange(json.dumps(asked).encode() + b"\n", left)
        if line is None:
            self.close()
            raise TooLarge(f"the chat template takes too much time or memory for the chat, and was ended; {SHORTEN}")
        answer = json.loads(line)
        if "error" in answer:
            raise problem(answer["error"], answer["reason"])
        return answer

    def _exchange(self, line: bytes, left: Callable[[], bool]) -> bytes | None:
        """Send a line and return the answer; None where there is none, or nobody waits for it any more."""
        answer, end = bytearray(), time.monotonic() + SILENT
        try:
            self._channel.settimeout(SILENT)
            self._channel.sendall(line)
            self._channel.settimeout(LOOK)
            while not answer.endswith(b"\n"):
                try:
                    piece = self._channel.recv(1 << 16)
                except TimeoutError:
                    if left() or time.monotonic() > end:
                        return None
                    continue
                if not piece:
                    return None
                answer += piece
        except OSError:
            return None
        return bytes(answer)


def end_process(process: subprocess.Popen, channel: socket.socket) -> None:
    """End the process of a template, also at the end of the interpreter."""
    channel.close()
    process.kill()
    process.wait()


def problem(kind: str, reason: str) -> UserError:
    """Return the error about a template, or about a chat that it refuses."""
    advice = "use another template"
    if kind == "refused":
        return ChatError(f"the chat template refuses the chat ({shown(reason)}); change the chat")
    if kind == "failed":
        return ChatError(f"the chat template fails for the chat ({shown(reason)}); change the chat, or {advice}")
    limits = {
        "long": "makes a text that is too long",
        "memory": "takes too much memory",
        "range": f"counts too far ({shown(reason)})",
    }
    if kind in limits:
        return TooLarge(f"the chat template {limits[kind]}; {SHORTEN}")
    sentence = "does what a template may not" if kind == "security" else "is not valid Jinja"
    return UserError(f"the chat template {sentence} ({shown(reason)}); {advice}")

"""A tokenizer's chat template, and its rendering in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from dtgpt.util.errors import UserError, optional_package, shown
from dtgpt.util.storage import read_regular

SANDBOX = Path(__file__).with_name("sandbox.py")
LONGEST = 1 << 20  # bytes of a template
PROBE = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]

SHORTEN = "shorten the chat, or use another template"

Message = dict[str, Any]
Span = tuple[int, int]  # of characters


class ChatError(UserError):
    """What is wrong with a chat, of which others may be right."""


class TooLarge(UserError):
    """A template takes more than it may for a chat. For a small chat it is the template that is wrong."""


@dataclass(frozen=True)
class ChatTemplate:
    """`source` in Jinja's language; `tokens`: names of special tokens that it may use, such as `bos_token`."""

    source: str
    tokens: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"source": self.source, "tokens": self.tokens}


@dataclass(frozen=True)
class Rendered:
    """A rendered chat, and where the blocks `{% generation %}` are in it."""

    text: str
    answers: list[Span]


def read_template(path: Path) -> str:
    """Return the template in a file. Raises UserError."""
    try:
        return read_regular(path, LONGEST).decode()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give the file of a chat template") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); give the file of a chat template") from None


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

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> Rendered:
        """Return a chat as text; with the beginning of an answer where a prompt is wanted. Raises UserError."""
        return self.render_each([(messages, add_generation_prompt)])[0]

    def render_each(self, chats: Sequence[tuple[Sequence[Message], bool]]) -> list[Rendered]:
        """Return several chats, each with whether the beginning of an answer follows. Raises UserError."""
        asked = [
            {"messages": list(messages), "add_generation_prompt": prompt, "tools": None, "documents": None}
            for messages, prompt in chats
        ]
        with self._lock:
            if self._process is None:
                self._start()
            found = self._ask(asked)["found"]
        return [Rendered(text, [(begin, end) for begin, end in spans]) for text, spans in found]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            with suppress(OSError):  # of what was not written any more
                process.communicate()

    def __del__(self) -> None:
        self.close()

    def _start(self) -> None:
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SANDBOX)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=kept | {"PYTHONIOENCODING": "utf-8"}, text=True, encoding="utf-8",
            start_new_session=True,  # ^C in a terminal is not for it
        )  # fmt: skip
        self.marks_answers = self._ask({"template": self.template.source, "tokens": self.template.tokens})["blocks"]

    def _ask(self, asked: Any) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            self.close()
            raise TooLarge(f"the chat template takes too much time or memory for the chat, and was ended; {SHORTEN}")
        answer = json.loads(line)
        if "error" in answer:
            raise problem(answer["error"], answer["reason"])
        return answer


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

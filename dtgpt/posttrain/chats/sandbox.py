"""A process that renders chat templates, started by `template.Renderer`; it imports nothing of dtgpt.

A template is code from elsewhere. Jinja's sandbox keeps it from attributes that lead to the interpreter; the limits of
this process keep it from all time, all memory, and files: it cannot open any.

Lines of JSON arrive on standard input and are answered on standard output. The first one is `{"template", "tokens"}`,
answered by `{"blocks": whether it marks answers}`; each other one is a list of renderings, answered by
`{"found": [[text, spans of answers], ...]}`. What goes wrong is answered by `{"error": kind, "reason": text}`.
"""

import datetime
import html  # noqa: F401 - as textwrap, imported by Jinja's filters when they are used
import json
import re
import resource
import signal
import sys
import textwrap  # noqa: F401
from typing import Any

import jinja2
import jinja2.debug  # imported by Jinja where an error occurs, when no file can be opened any more
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

SECONDS = 10  # of processor time for an answer, which other processes do not make longer
MEMORY = 1 << 30  # bytes of addresses
MOST_CHARACTERS = 1 << 24  # of a rendered chat
BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
WIDTH = re.compile(r"\d{5,}|\*")


class TooLong(Exception):
    """A rendered chat has more than MOST_CHARACTERS."""


class Refused(jinja2.TemplateError):
    """The template itself refuses the chat, by `raise_exception`."""


class Generation(Extension):
    """The block `{% generation %}` around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        self.pieces: list[str] = []
        self.blocks: list[tuple[int, str]] = []  # where each begins, and its text
        environment.extend(generation=self)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_take"), [], [], body).set_lineno(line)

    def _take(self, caller: Any) -> str:
        text = caller()
        self.blocks.append((sum(map(len, self.pieces)), text))
        return text


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, without products and formats that make long texts of short templates."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("a power is not allowed")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if hasattr(value, "__len__") and isinstance(times, int) and len(value) * times > MOST_CHARACTERS:
                    raise TooLong
        if operator == "%" and isinstance(left, str) and WIDTH.search(left):
            raise TooLong
        return super().call_binop(context, operator, left, right)


def make_environment() -> Any:
    """Return the environment in which transformers renders templates, too."""
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])

    def refuse(message: str) -> None:
        raise Refused(str(message))

    def to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    del environment.globals["lipsum"]
    return environment


def render(template: Any, arguments: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a chat, and where the blocks of answers are in it, in characters. Raises ValueError where they
    are not, or the text is none."""
    generation = template.environment.generation
    generation.pieces, generation.blocks = [], []
    length = 0
    for piece in template.generate(**arguments):
        generation.pieces.append(piece)
        length += len(piece)
        if length > MOST_CHARACTERS:
            raise TooLong
    whole = "".join(generation.pieces)
    whole.encode()  # raises where half of a character is in it
    for begin, text in generation.blocks:
        if not whole.startswith(text, begin):
            raise ValueError("a generation block is not written where it stands")
    return whole, [(begin, begin + len(text)) for begin, text in generation.blocks]


def describe(error: BaseException) -> dict[str, str]:
    """Return the answer about an error."""
    kinds = (
        (Refused, "refused"),
        (SecurityError, "security"),
        (TooLong, "long"),
        (MemoryError, "memory"),
        (jinja2.TemplateSyntaxError, "syntax"),
        (OverflowError, "range"),
        (RecursionError, "memory"),
    )
    kind = next((kind for found, kind in kinds if isinstance(error, found)), "failed")
    reason = f"{type(error).__name__}: {error}" if kind == "failed" else str(error)
    return {"error": kind, "reason": reason[:300]}


def answer(line: str, state: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a line."""
    try:
        asked = json.loads(line)
        if isinstance(asked, dict):
            state["template"] = make_environment().from_string(asked["template"])
            state["tokens"] = asked["tokens"]
            return {"blocks": BLOCK.search(asked["template"]) is not None}
        return {"found": [render(state["template"], state["tokens"] | arguments) for arguments in asked]}
    except Exception as error:
        return describe(error)


def main() -> None:
    make_environment().from_string("{{ 'a' | tojson }}").render()  # imports what Jinja imports when it is used
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # standard input, output and error: no other file opens
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    state: dict[str, Any] = {}
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # whose signal ends this process, in the middle of any call
        sys.stdout.write(json.dumps(answer(line, state)) + "\n")
        sys.stdout.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()

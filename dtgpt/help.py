"""The `--help` of every command: its text, then its options in groups, wrapped to the terminal's width."""

import re
import shutil
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

from dtgpt.overrides import REQUIRED, describe_type, leaves

HELP = ("-h", "--help")
LEFT = 34  # the column in which descriptions begin
LONGEST_TYPE = 24  # more choices are listed in the description
LABEL = re.compile(r" *(?:\S+ )*\S+ {2,}(?=\S)")  # "hardware   one GPU": what follows hangs behind the blanks


def wants_help(words: list[str]) -> bool:
    return any(word in HELP for word in words)


def help_text(config: Any, doc: str, program: str, *more: Any, without: Collection[str] = ()) -> str:
    """Return the usage, `doc`, and the options of `config` and `more` with type, description and default, as wide as
    the terminal (80 columns where there is none). A config's class will do, whose defaults are then shown. An option
    that several have is the first one's; those in `without` are left out."""
    width = max(40, shutil.get_terminal_size().columns)
    usage = textwrap.wrap(f"usage: {program} [--option value ...]", width, subsequent_indent=" " * 7)
    lines = [*usage, "", *_wrap_text(doc.strip(), width)]  # which ends with an empty line
    told = set(without)
    for each in (config, *more):
        groups = _groups(each, told)
        told |= {option[0] for options in groups.values() for option in options}
        for heading, options in groups.items():
            lines.append(f"{heading}:")
            for option in options:
                lines += _row(*option, width)
            lines.append("")
    return "\n".join(lines).rstrip()


def _groups(config: Any, told: Collection[str]) -> dict[str, list[tuple]]:
    """Options that are not yet `told` by heading: their section, or what the config's `headings` say from a field
    on."""
    headings, groups = getattr(config, "headings", {}), {}
    top = "options"
    for option in leaves(config):
        section = option[0].rpartition(".")[0]
        top = headings.get(option[0], top)
        if option[0] not in told:
            groups.setdefault(section or top, []).append(option)
    return groups


def _row(name: str, type_: Any, description: str, value: Any, width: int) -> Iterator[str]:
    kind = describe_type(type_)
    if len(kind) > LONGEST_TYPE:
        kind, description = "NAME", f"{description}; one of {kind.replace('|', ', ')}"
    left, default = f"  --{name} {kind}", _show(value)
    right = textwrap.wrap(f"{description} [{default}]", width - LEFT, break_on_hyphens=False)
    if len(left) > LEFT - 2:
        yield left
        left = ""
    for i, line in enumerate(right):
        yield f"{left if i == 0 else '':<{LEFT}}{line}"


def _show(value: Any) -> str:
    if isinstance(value, tuple) and value:
        value = " ".join(value)
    return {None: "none", "": "empty", (): "none", REQUIRED: "set by the recipe"}.get(value, str(value))


def _wrap_text(text: str, width: int) -> Iterator[str]:
    """Yield the lines of a docstring. Paragraphs, and entries whose text hangs behind a label, are filled anew."""
    entry: list[str] = []
    for line in [*text.expandtabs().splitlines(), ""]:
        hangs = entry and line.startswith(" " * _hang(entry[0])) and not LABEL.match(line)
        if not (line.strip() and hangs):
            if entry:
                filled = " ".join([entry[0].rstrip(), *(part.strip() for part in entry[1:])])
                indent = " " * _hang(entry[0])
                yield from textwrap.wrap(filled, width, subsequent_indent=indent, break_on_hyphens=False)
            if not line.strip() and entry:
                yield ""
            entry = []
        if line.strip():
            entry.append(line)


def _hang(line: str) -> int:
    label = LABEL.match(line)
    return label.end() if label else len(line) - len(line.lstrip())

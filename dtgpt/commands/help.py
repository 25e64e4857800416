"""The text of `--help`: what a command does, then its options in groups, wrapped to the terminal's width."""

import re
import shutil
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

from dtgpt.config.overrides import REQUIRED, describe_type, leaves, value_text

HELP = ("-h", "--help")
LEFT = 34  # the column where descriptions begin
LONGEST_TYPE = 24  # longer lists of choices stand in the description
LABEL = re.compile(r" *(?:\S+ )*\S+ {2,}(?=\S)")  # "hardware   one GPU": further lines are indented to the text
ENTRY = rf"\n(?=\S|{LABEL.pattern})"  # between two of them


def wants_help(words: list[str]) -> bool:
    """Return whether help is asked for anywhere on a command line."""
    return any(word in HELP for word in words)


def help_text(doc: str, program: str, *configs: Any, without: Collection[str] = ()) -> str:
    """Return the usage, `doc`, and the options of `configs` with type, description and default, wrapped to the terminal
    (80 columns if there is none). A config may be a class, whose defaults are then shown. If several configs have the
    same option, the first one's is shown; options in `without` are not."""
    width = max(40, shutil.get_terminal_size().columns)
    usage = textwrap.wrap(f"usage: {program} [--option value ...]", width, subsequent_indent=" " * 7)
    lines = [*usage, "", *_wrap_text(doc.strip(), width)]  # which ends with an empty line
    listed = set(without)
    for config in configs:
        groups = _groups(config, listed)
        for heading, options in groups.items():
            lines.append(f"{heading}:")
            for name, type_, description, value in options:
                listed.add(name)
                lines += _row(name, type_, description, value, width)
            lines.append("")
    return "\n".join(lines).rstrip()


def _groups(config: Any, listed: Collection[str]) -> dict[str, list[tuple[str, Any, str, Any]]]:
    """Return the options that are not yet `listed` by heading: their section, or the entry of the config's `headings`
    at or before the field."""
    headings, top = getattr(config, "headings", {}), "options"
    groups: dict[str, list[tuple[str, Any, str, Any]]] = {}
    for option in leaves(config):
        section = option[0].rpartition(".")[0]
        top = headings.get(option[0], top)
        if option[0] not in listed:
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
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "set by the recipe" if value is REQUIRED else value_text(value) or "empty"


def _wrap_text(text: str, width: int) -> Iterator[str]:
    """Yield the lines of a docstring, its paragraphs rewrapped; lines with a label are paragraphs of their own."""
    for paragraph in re.split(r"\n\s*\n", text.expandtabs()):
        for entry in re.split(ENTRY, paragraph) if LABEL.match(paragraph) else [paragraph]:
            label = LABEL.match(entry)
            begin = label.end() if label else 0
            filled = entry[:begin] + " ".join(entry[begin:].split())
            yield from textwrap.wrap(filled, width, subsequent_indent=" " * begin, break_on_hyphens=False)
        yield ""

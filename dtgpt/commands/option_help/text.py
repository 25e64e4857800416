"""The text of `--help`, wrapped to the terminal: all of it follows from the annotations of fields."""

import re
import shutil
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

from dtgpt.commands.command import ALL
from dtgpt.config.overrides import REQUIRED, describe_type, leaves
from dtgpt.util.shared.option_words import value_text

LEFT = 34  # the column where descriptions begin
LONGEST_TYPE = 24  # longer lists of choices stand in the description
LABEL = re.compile(r" *(?:\S+ )*\S+ {2,}(?=\S)")  # "hardware   one GPU": further lines are indented to the text
ENTRY = rf"\n(?=\S|{LABEL.pattern})"  # between two of them


def describe(
    doc: str, program: str, *configs: Any, without: Collection[str] = (), words: Collection[str] = (ALL,)
) -> str:
    """Return the usage, `doc`, and the options of `configs` with type, description and default, wrapped to the terminal
    (80 columns if there is none). A config may be a class, whose defaults are then shown. If several configs have the
    same option, the first one's is shown; options in `without` are not. words: unless they ask for all, of a config
    that names its `common` options these alone are listed, and of each description what stands before its first
    semicolon."""
    every, width = ALL in words, max(40, shutil.get_terminal_size().columns)
    usage = textwrap.wrap(f"usage: {program} [--option value ...]", width, subsequent_indent=" " * 7)
    lines = [*usage, "", *_wrap_text(doc.strip(), width)]  # which ends with an empty line
    listed = set(without)
    for config in configs:
        groups = _groups(config, listed, every)
        for heading, options in groups.items():
            lines.append(f"{heading}:")
            for name, type_, text, value in options:
                listed.add(name)
                lines += _row(name, type_, text if every else text.partition(";")[0], value, width)
            lines.append("")
    if not every:
        hidden = {name for config in configs for name, *_ in leaves(config)} - listed
        lines.append(f"{len(hidden)} more options: {ALL}")
    return "\n".join(lines).rstrip()


def _groups(config: Any, listed: Collection[str], every: bool = True) -> dict[str, list[tuple[str, Any, str, Any]]]:
    """Return the options that are not yet `listed` by heading: their section, or the entry of the config's `headings`
    at or before the field."""
    headings, top = getattr(config, "headings", {}), "options"
    common = None if every else getattr(config, "common", None)
    groups: dict[str, list[tuple[str, Any, str, Any]]] = {}
    for option in leaves(config):
        section = option[0].rpartition(".")[0]
        top = headings.get(option[0], top)
        if option[0] not in listed and (common is None or option[0] in common):
            groups.setdefault(section or top, []).append(option)
    return groups


def _row(name: str, type_: Any, description: str, value: Any, width: int) -> Iterator[str]:
    kind = describe_type(type_)
    if len(kind) > LONGEST_TYPE:
        kind, description = "NAME", f"{description}; one of {kind.replace('|', ', ')}"
    left = f"  --{name} {kind}"
    if len(left) > LEFT - 2:  # the description begins below
        yield left
        left = ""
    yield from textwrap.wrap(
        f"{description} [{_show(value)}]",
        width,
        initial_indent=f"{left:<{LEFT}}",
        subsequent_indent=" " * LEFT,
        break_on_hyphens=False,
    )


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

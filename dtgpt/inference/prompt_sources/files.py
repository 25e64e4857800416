"""Files of prompts, one a line: plain text, or JSON objects with options of their own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dtgpt.inference.options import NAMES, advice
from dtgpt.util.errors import UserError, shown, shown_name
from dtgpt.util.storage import parse_json, read_regular

LARGEST = 1 << 30  # bytes of a file
SUFFIXES = (".jsonl", ".ndjson", ".json")  # of files whose lines are JSON
NOT_OPTIONS = ("top_logprobs", "prompt_logprobs")  # which results in files do not have
KEYS = ("prompt", "id", *(name for name in NAMES if name not in NOT_OPTIONS))


class Line(NamedTuple):
    """A prompt of a file."""

    number: int  # from 1
    prompt: str
    options: dict[str, Any]  # by name
    id: Any = None  # of the user, for the result


def read_prompts_file(path: Path) -> list[Line]:
    """Return the prompts of a file, without blank lines. Lines of a .jsonl are objects with the text under `prompt` and
    any option as a further key. Raise UserError, with the number of the line, for what is not a prompt."""
    try:
        content = read_regular(path, LARGEST)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{path} cannot be read ({reason}); give a file with a prompt in each line") from None
    read = _from_json if path.suffix.lower() in SUFFIXES else _from_text
    lines = [read(number, line, f"{path}, line {number}") for number, line in _lines(content, path)]
    if not lines:
        raise UserError(f"{path} has no prompt; write one in each line")
    return lines


def _lines(content: bytes, path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, and their numbers. A line ends with "\\n", "\\r\\n" or "\\r", as in Python's
    text files: other separators of Unicode may be part of a prompt."""
    content = content.removeprefix(b"\xef\xbb\xbf")
    for number, line in enumerate(content.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"), 1):
        if line.strip():
            try:
                yield number, line.decode()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}, line {number} is not UTF-8 (byte {error.start + 1}); convert the file with iconv -f "
                    "ENCODING -t UTF-8"
                ) from None


def _from_text(number: int, line: str, place: str) -> Line:
    return Line(number, line, {})


def _from_json(number: int, line: str, place: str) -> Line:
    try:
        given = parse_json(line)
    except ValueError as error:
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise UserError(f'{place} is not JSON ({reason}); write an object such as {{"prompt": "Hello"}}') from None
    if not isinstance(given, dict) or not isinstance(given.get("prompt"), str):
        raise UserError(f'{place} is {shown(given)}, not an object with a text under "prompt"; write one')
    names = [name for name, _ in json.loads(line, object_pairs_hook=list)]
    if len(names) > len(given):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{place} has the key {shown_name(twice)} twice; leave one out")
    wrong = next((name for name in given if name not in KEYS), None)
    if wrong is not None:
        raise UserError(f"{place} has the key {shown_name(wrong)}; {advice(wrong, KEYS)}")
    if not _is_json(given.get("id")):
        raise UserError(f"{place} has the id {shown(given['id'])}, which JSON does not have; use a text or a number")
    prompt = given["prompt"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # JSON may escape halves
    return Line(number, prompt, {name: value for name, value in given.items() if name in NAMES}, given.get("id"))


def _is_json(value: Any) -> bool:
    """Return whether a value that Python's reader made can be written again: it also takes NaN and 1e999."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True

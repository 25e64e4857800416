"""Documents in lines: of JSON, or of plain text. Each line is read by itself, and one that is no document becomes a
reason with its file and number. What a line holds is `{key: [pieces of text]}`."""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from dtgpt.data.prepare.compressed import decompressed
from dtgpt.data.text import BLOCK, BYTE_ORDER_MARK, Broken, count_lines, paired
from dtgpt.util.errors import UserError, shown

LONGEST = 1 << 28  # bytes of a line, which takes several times as much memory when it is parsed
MOST_NESTED = 1 << 22  # lists and objects in a line: each takes a hundred bytes of memory for two of the line
STDIN = "-"
ONE_A_LINE = "dtgpt reads one object a line, as jq -c . writes (jq -c '.[]' of an array)"

Document = dict[str, list[str]]
T = TypeVar("T")


class InputFile(NamedTuple):
    """An input: its path, or the name of a data set, and "jsonl", "parquet", "hub", "txt" (one document) or "lines"
    (one a line)."""

    path: str
    kind: str

    @property
    def name(self) -> str:
        return "standard input" if self.path == STDIN else self.path


class Unreadable(Exception):
    """Why a line is not a document."""


def whole_lines(source: InputFile, pieces: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (number of the first line, lines of about BLOCK bytes); only the last line of all may lack its end. As in
    the text files of Python, and so in Megatron-LM, a line ends with "\\n", "\\r" or both."""
    held: list[bytes] = []
    first, size = 1, 0
    for piece in pieces:
        if first == 1 and not held:
            piece = piece.removeprefix(BYTE_ORDER_MARK)
        held.append(piece)
        size += len(piece)
        # A "\r" at the very end may be half of "\r\n".
        cut = max(piece.rfind(b"\n"), piece.rfind(b"\r", 0, len(piece) - 1)) + 1
        if size >= BLOCK and cut:
            held[-1] = piece[:cut]
            data = b"".join(held)
            yield first, data
            first += count_lines(data)
            held, size = [piece[cut:]], len(piece) - cut
        elif size > LONGEST:
            raise UserError(
                f"{source.name}, line {first} or later: longer than {LONGEST >> 20} MiB; is this {source.kind}?"
            )
    if size:
        yield first, b"".join(held)


def parsed_lines(source: InputFile, first: int, data: bytes, read: Callable[[bytes], T]) -> Iterator[T | Broken]:
    """Yield what `read`, which may raise Unreadable, makes of each line that is not blank. first: the number of the
    first line of `data`."""
    if data.isspace():
        return
    for number, line in enumerate(data.splitlines(), first):
        if line.strip():
            try:
                yield read(line)
            except Unreadable as reason:
                yield Broken(source.name, number, str(reason))


def present(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of an object that are not null, as `object_pairs_hook` of `json.loads`: tables such as Parquet
    give each row every field, and null where the row has none."""
    return {name: value for name, value in fields if value is not None}


def json_document(line: bytes, keys: tuple[str, ...]) -> Document:
    if (strict := _strict_object(line)) is not None:
        return {key: _texts(strict, key) for key in keys}
    fields = json_object(line, dict)
    document = {key: _texts(fields, key) for key in keys}
    if b"\\u" in line:
        return {key: [paired(text) for text in texts] for key, texts in document.items()}
    return document


def _strict_object(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line by orjson, in a quarter of the time; None where that is not installed, or refuses the
    line, of which `json` may take some: NaN and halves of surrogate pairs. Texts are the same, long integers are
    rounded."""
    loads = _orjson_loads()
    if loads is None or _is_too_nested(line):
        return None
    try:
        fields = loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


@cache
def _orjson_loads() -> Callable[[bytes], Any] | None:
    try:
        return import_module("orjson").loads
    except ImportError:
        return None


def _is_too_nested(line: bytes) -> bool:
    return len(line) > MOST_NESTED and line.count(b"[") + line.count(b"{") > MOST_NESTED


def json_object(line: bytes, make: Callable[[Any], dict[str, Any]] = present) -> dict[str, Any]:
    """Return the JSON object in a line, by default without the fields that are null, in objects within it, too. Raises
    Unreadable."""
    if _is_too_nested(line):
        raise Unreadable(
            f"more than {MOST_NESTED:,} lists and objects, which take all memory; cut it into several lines"
        )
    try:
        fields = json.loads(line.decode(), object_pairs_hook=make if b"null" in line else None)
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8 (byte {error.start + 1} of the line)") from None
    except (ValueError, RecursionError) as error:
        if line.strip() in (b"{", b"["):
            raise Unreadable(f"the file is one JSON document on several lines; {ONE_A_LINE}") from None
        column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise Unreadable(f"not JSON ({getattr(error, 'msg', error)}{column})") from None
    if isinstance(fields, list):
        raise Unreadable(f"a JSON array; {ONE_A_LINE}")
    if not isinstance(fields, dict):
        raise Unreadable('not a JSON object; each line must be one, such as {"text": ...}')
    return fields


def _texts(fields: dict, key: str) -> list[str]:
    if key not in fields:
        raise Unreadable(f"no key {shown(key)}")
    texts = fields[key] if isinstance(fields[key], list) else [fields[key]]
    if not all(isinstance(text, str) for text in texts):
        raise Unreadable(f"{shown(key)} holds neither text nor a list of texts")
    return texts


def text_line(line: bytes, keys: tuple[str, ...]) -> Document:
    """Return the document that a line of plain text is. Raises Unreadable."""
    try:
        return {keys[0]: [line.decode()]}
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8 (byte {error.start + 1} of the line)") from None


def read_json_lines(path: str, key: str) -> Iterator[str]:
    """Yield the texts under `key` of a .jsonl, which may be compressed. Raise UserError for the first line that is no
    document, and where the file cannot be read."""
    source = InputFile(path, "jsonl")
    try:
        with open(path, "rb") as file:
            for first, data in whole_lines(source, decompressed(file, path)):
                for found in parsed_lines(source, first, data, lambda line: json_document(line, (key,))):
                    if isinstance(found, Broken):
                        raise UserError(
                            f"data.path={found}; each line of a .jsonl must be a JSON object with a text under "
                            "--data.json_key, in UTF-8 (which iconv -f ENCODING -t UTF-8 converts to)"
                        )
                    yield from found[key]
    except OSError as error:
        raise UserError(f"the input {path} cannot be read: {error.strerror}; check its path and permissions") from None

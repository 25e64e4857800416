"""Documents in texts and JSON lines. What a line or a file holds is `{key: [pieces of text]}`, or the reason why it is
no document."""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from dtgpt.util.errors import UserError, shown
from dtgpt.util.storage import present

BLOCK = 1 << 20  # bytes
LONGEST = 1 << 28  # bytes of a line, which takes several times as much memory when it is parsed
MOST_NESTED = 1 << 22  # lists and objects in a line: each takes a hundred bytes of memory for two of the line
LONGEST_TEXT = 1 << 30  # bytes of a text that is one document
STDIN = "-"
ONE_A_LINE = "dtgpt reads one object a line, as jq -c . writes (jq -c '.[]' of an array)"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Document = dict[str, list[str]]
T = TypeVar("T")


class Broken(NamedTuple):
    """A line that is not a document."""

    source: str
    line: int  # from 1
    reason: str

    def __str__(self) -> str:
        return f"{self.source}, line {self.line}: {self.reason}"


class InputFile(NamedTuple):
    """An input: its path, and "jsonl", "parquet", "txt" (one document) or "lines" (one a line)."""

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


def count_lines(data: bytes) -> int:
    """Return the number of line ends in `data`."""
    return data.count(b"\n") + (data.count(b"\r") - data.count(b"\r\n") if b"\r" in data else 0)


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


def json_document(line: bytes, keys: tuple[str, ...]) -> Document:
    fields = json_object(line, dict)
    document = {key: _texts(fields, key) for key in keys}
    if b"\\u" in line:
        return {key: [paired(text) for text in texts] for key, texts in document.items()}
    return document


def json_object(line: bytes, make: Callable[[Any], dict[str, Any]] = present) -> dict[str, Any]:
    """Return the JSON object in a line, by default without the fields that are null, in objects within it, too. Raises
    Unreadable."""
    if len(line) > MOST_NESTED and line.count(b"[") + line.count(b"{") > MOST_NESTED:
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


def paired(text: str) -> str:
    """Return the text with U+FFFD for halves of surrogate pairs, which a JSON string may escape."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def text_line(line: bytes, keys: tuple[str, ...]) -> Document:
    try:
        return {keys[0]: [line.decode()]}
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8 (byte {error.start + 1} of the line)") from None


def whole_text(source: InputFile, pieces: Iterator[bytes], keys: tuple[str, ...]) -> Document | Broken:
    held = bytearray()
    for piece in pieces:
        held += piece
        if len(held) > LONGEST_TEXT:
            raise UserError(
                f"{source.name} is longer than {LONGEST_TEXT >> 20} MiB, too long for one document; cut it into "
                "several files, or let dtgpt prepare read it with --txt line"
            )
    data = held.removeprefix(BYTE_ORDER_MARK) if held.startswith(BYTE_ORDER_MARK) else held
    try:
        return {keys[0]: [data.decode()]}
    except UnicodeDecodeError as error:
        line = count_lines(bytes(data[: error.start])) + 1
        return Broken(source.name, line, f"not UTF-8 (byte {error.start + 1} of the file)")

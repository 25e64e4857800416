"""Text to train on: documents in .txt and .jsonl files, or the text that every Python installation carries.

Files of others are rarely what they should be: lines without text, bytes that are not UTF-8, an array in place of
lines, a table under a wrong name. So each line is read by itself, and one that is no document becomes a reason with its
file and number, which the caller reports. What a line or a file holds is `{key: [pieces of text]}`."""

import json
import os
from collections.abc import Callable, Iterator
from io import BufferedReader
from typing import Any, NamedTuple, TypeVar

from dtgpt.util import seams
from dtgpt.util.errors import UserError, shown
from dtgpt.util.storage import present

EMBEDDED = "the manual texts of pydoc_data.topics"
SUFFIXES = (".txt", ".jsonl")
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


def read_documents(path: str | None, json_key: str) -> list[str]:
    """Return the documents of `path` (.txt: one document; .jsonl: one per line, under `json_key`), or of the embedded
    text. Empty documents are left out. Raises UserError if there is no text to read."""
    documents = [d for d in (_read_file(path, json_key) if path else _embedded()) if d.strip()]
    if not documents:
        raise UserError(f"data.path={path} holds no text; give a file with some, or leave data.path out")
    return documents


def _embedded() -> Iterator[str]:
    """Yield English reference text of 0.4 MB. Paragraphs that several topics have are kept once, so that the validation
    part does not repeat the training part."""
    from pydoc_data.topics import topics

    seen = set()
    for _, topic in sorted(topics.items()):
        fresh = []
        for paragraph in topic.split("\n\n"):
            if paragraph.strip() not in seen:
                seen.add(paragraph.strip())
                fresh.append(paragraph)
        yield "\n\n".join(fresh)


def _read_file(path: str, json_key: str) -> Iterator[str]:
    if not os.path.exists(path):  # which, unlike Path.exists, takes names too long for a file
        raise UserError(
            f"data.path={path} does not exist; give a {' or '.join(SUFFIXES)} file, or leave data.path out "
            f"to train on {EMBEDDED}"
        )
    if not os.path.isfile(path) or not path.endswith(SUFFIXES):
        raise UserError(f"data.path={path} is not a text file that dtgpt reads; give a {' or '.join(SUFFIXES)} file")
    for found in _documents(InputFile(path, "txt" if path.endswith(".txt") else "jsonl"), json_key):
        if isinstance(found, Broken):
            raise UserError(
                f"data.path={found}; each line of a .jsonl must be a JSON object with a text under "
                "--data.json_key, in UTF-8 (which iconv -f ENCODING -t UTF-8 converts to)"
            )
        yield from found[json_key]


def _documents(source: InputFile, key: str) -> Iterator[Document | Broken]:
    try:
        with open(source.path, "rb") as file:
            pieces = _pieces(file, source.path)
            if source.kind == "txt":
                yield whole_text(source, pieces, (key,))
                return
            for first, data in whole_lines(source, pieces):
                yield from parsed_lines(source, first, data, lambda line: json_document(line, (key,)))
    except OSError as error:
        raise UserError(
            f"the input {source.path} cannot be read: {error.strerror}; check its path and permissions"
        ) from None


def _pieces(file: BufferedReader, name: str) -> Iterator[bytes]:
    """Return the content of a file, or what a format of a capability (see `data.open`) makes of it: it may be
    compressed."""
    unpacked = (form.unpacked(file, name) for form in seams.listed("datasets"))
    return next(filter(None, unpacked), None) or iter(lambda: file.read(BLOCK), b"")


def split_documents(documents: list[str], held_out: float) -> tuple[list[str], list[str]]:
    """Cut off the last `held_out` of the characters for validation; a document that straddles is cut at a line end."""
    budget = round(held_out * sum(map(len, documents)))
    if budget == 0:
        return documents, []
    train, valid = list(documents), []
    while budget > 0:
        document = train.pop()
        if len(document) <= budget and train:
            valid.append(document)
            budget -= len(document)
            continue
        cut = len(document) - budget
        line_end = document.find("\n", cut)
        cut = line_end + 1 if 0 < line_end + 1 < len(document) else cut
        train.append(document[:cut])
        valid.append(document[cut:])
        break
    return train, valid[::-1]

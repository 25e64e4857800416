"""Text to train on: a file that is one document, or the text that every Python installation carries.

Files of others are rarely what they should be: bytes that are not UTF-8, a table under a wrong name, nothing at all.
What is no text becomes a sentence with the file and the line. Lines of JSON, and what is compressed, are read by
formats of capabilities (`data/open.py`)."""

import os
from collections.abc import Iterator
from io import BufferedReader
from typing import NamedTuple

from dtgpt.util import seams
from dtgpt.util.errors import UserError

EMBEDDED = "the manual texts of pydoc_data.topics"
SUFFIXES = (".txt", ".jsonl")
BLOCK = 1 << 20  # bytes
LONGEST_TEXT = 1 << 30  # bytes of a text that is one document
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Broken(NamedTuple):
    """A line that is not a document."""

    source: str
    line: int  # from 1
    reason: str

    def __str__(self) -> str:
        return f"{self.source}, line {self.line}: {self.reason}"


def whole_text(name: str, pieces: Iterator[bytes]) -> str | Broken:
    """Return the text of a file that is one document. Raise UserError where it is too long for one."""
    held = bytearray()
    for piece in pieces:
        held += piece
        if len(held) > LONGEST_TEXT:
            raise UserError(
                f"{name} is longer than {LONGEST_TEXT >> 20} MiB, too long for one document; cut it into several "
                "files, or let dtgpt prepare read it with --txt line"
            )
    data = held.removeprefix(BYTE_ORDER_MARK) if held.startswith(BYTE_ORDER_MARK) else held
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = count_lines(bytes(data[: error.start])) + 1
        return Broken(name, line, f"not UTF-8 (byte {error.start + 1} of the file)")


def count_lines(data: bytes) -> int:
    """Return the number of line ends in `data`."""
    return data.count(b"\n") + (data.count(b"\r") - data.count(b"\r\n") if b"\r" in data else 0)


def paired(text: str) -> str:
    """Return the text with U+FFFD for halves of surrogate pairs, which a JSON string may escape."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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
        if (named := seams.ask("datasets", lambda form: form.named_documents(path, json_key))) is not None:
            return named
        raise UserError(
            f"data.path={path} does not exist; give a {' or '.join(SUFFIXES)} file, or leave data.path out "
            f"to train on {EMBEDDED}"
        )
    if os.path.isfile(path) and path.endswith(".txt"):
        return iter([_read_text(path)])
    documents = seams.ask("datasets", lambda form: form.documents(path, json_key)) if os.path.isfile(path) else None
    if documents is None:
        raise UserError(f"data.path={path} is not a text file that dtgpt reads; give a {' or '.join(SUFFIXES)} file")
    return documents


def _read_text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            found = whole_text(path, _pieces(file, path))
    except OSError as error:
        raise UserError(f"the input {path} cannot be read: {error.strerror}; check its path and permissions") from None
    if isinstance(found, Broken):
        raise UserError(f"data.path={found}; a text must be in UTF-8, which iconv -f ENCODING -t UTF-8 converts to")
    return found


def _pieces(file: BufferedReader, name: str) -> Iterator[bytes]:
    """Return the content of a file, or what a format of a capability makes of it: it may be
    compressed."""
    return seams.ask("datasets", lambda form: form.unpacked(file, name)) or iter(lambda: file.read(BLOCK), b"")


def split_documents(documents: list[str], held_out: float) -> tuple[list[str], list[str]]:
    """Cut off the last `held_out` of the characters for validation; a document that straddles is cut at a line end."""
    budget = round(held_out * sum(map(len, documents)))
    if budget == 0:
        return documents, []
    train, valid = list(documents), []  # from the end on, so that the training text is a beginning of the whole
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

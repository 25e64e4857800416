"""Text to train on: a file of the user's, or the text that every Python installation carries."""

import os
from collections.abc import Iterator
from io import BufferedReader

from dtgpt.data.documents import (
    BLOCK,
    Broken,
    Document,
    InputFile,
    json_document,
    parsed_lines,
    whole_lines,
    whole_text,
)
from dtgpt.util import seams
from dtgpt.util.errors import UserError

EMBEDDED = "the manual texts of pydoc_data.topics"
SUFFIXES = (".txt", ".jsonl")


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

"""Where text comes from: a file of the user's, or the text that every Python installation carries."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from dtgpt.util.errors import UserError, shown

EMBEDDED = "the manual texts of pydoc_data.topics"
SUFFIXES = (".txt", ".jsonl")


def read_documents(path: str | None, json_key: str) -> list[str]:
    """The documents of `path` (.txt: one document; .jsonl: one a line, under `json_key`), or the embedded text.

    Empty documents are left out. Raises UserError where there is no text to read.
    """
    documents = [d for d in (_read_file(Path(path), json_key) if path else _embedded()) if d.strip()]
    if not documents:
        raise UserError(f"data.path={path} holds no text; give a file with some, or leave data.path out")
    return documents


def _embedded() -> Iterator[str]:
    """English reference text of 0.4 MB. Paragraphs that stand in several topics are kept once, so that the held-out
    part is not a repetition of the training part."""
    from pydoc_data.topics import topics

    seen = set()
    for _, topic in sorted(topics.items()):
        fresh = []
        for paragraph in topic.split("\n\n"):
            if paragraph.strip() not in seen:
                seen.add(paragraph.strip())
                fresh.append(paragraph)
        yield "\n\n".join(fresh)


def _read_file(path: Path, json_key: str) -> Iterator[str]:
    if not os.path.exists(path):  # which, unlike Path.exists, takes names too long for a file
        raise UserError(
            f"data.path={path} does not exist; give a {' or '.join(SUFFIXES)} file, or leave data.path out "
            f"to train on {EMBEDDED}"
        )
    if not path.is_file() or path.suffix not in SUFFIXES:
        raise UserError(f"data.path={path} is not a text file that dtgpt reads; give a {' or '.join(SUFFIXES)} file")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.path={path} is not UTF-8 (byte {error.start}); convert it, as with iconv -t UTF-8"
        ) from None
    except OSError as error:
        raise UserError(f"data.path={path} cannot be read: {error.strerror}") from None
    return _json_lines(path, text, json_key) if path.suffix == ".jsonl" else iter([text])


def _json_lines(path: Path, text: str, key: str) -> Iterator[str]:
    # Split at "\n" only: a JSON string may hold U+2028 and its kin, which str.splitlines() would cut.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)
            raise UserError(f"{path}, line {number}: not JSON ({reason}); each line must be one JSON object") from None
        if not isinstance(document, dict) or not isinstance(document.get(key), str):
            raise UserError(
                f"{path}, line {number}: no text under {shown(key)}; name the right field with --data.json_key"
            )
        yield paired(document[key])


def paired(text: str) -> str:
    """Without halves of surrogate pairs, which a JSON string may escape and which are no text: U+FFFD stands there."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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

"""Documents for `dtgpt prepare`: JSON lines and plain text, from files and standard input.

The parent process cuts inputs into blocks of about `BLOCK` bytes without looking into them where it can; a block gives
its documents in the worker that encodes them. A document is `{key: [pieces of text]}`; what cannot be read is a
`Broken`, with file and line. Nothing is held whole but a `.txt` file that is one document.
"""

import glob
import io
import os
import select
import shlex
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from dtgpt.data.prepare.compressed import HEAD, SUFFIXES, check_format, decompressed
from dtgpt.data.prepare.documents import (
    BLOCK,
    STDIN,
    Document,
    InputFile,
    json_document,
    parsed_lines,
    text_line,
    whole_lines,
)
from dtgpt.data.prepare.parquet import row_pieces
from dtgpt.data.text import Broken, whole_text
from dtgpt.hub.names import PREFIX
from dtgpt.util.errors import UserError
from dtgpt.util.rules import Is, Rule, Rules, check_rules

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in collections.abc from Python 3.12 on

T = TypeVar("T")
POLL = 0.5  # seconds
KINDS = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".txt": "txt", ".parquet": "parquet"}
TABLES = (".csv", ".tsv")
UNPACK = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
PARQUET = b"PAR1"  # with which such a file begins


PARQUET_RULES: Rules = (
    Rule(
        "a Parquet file is read from its end, and {file.name} is a stream; give the path of a file",
        Is("head", "==", None),
    ),
    Rule(
        "{file.name} is not a Parquet file, which begins with PAR1; fetch it again, or unpack it",
        Is("begin", "!=", PARQUET),
    ),
)


@dataclass
class Lines:
    """Whole lines, not parsed; `first` is the number of the first one. `position`: bytes of all inputs on disk, up to
    the end of the block."""

    position: int
    source: InputFile
    first: int
    data: bytes

    def documents(self, keys: tuple[str, ...]) -> Iterator[Document | Broken]:
        """Yield a document per line that is not blank."""
        read = text_line if self.source.kind == "lines" else json_document
        return self.parsed(lambda line: read(line, keys))

    def parsed(self, read: Callable[[bytes], T]) -> Iterator[T | Broken]:
        """Yield what `read`, which may raise Unreadable, makes of each line that is not blank."""
        return parsed_lines(self.source, self.first, self.data, read)


@dataclass
class Parsed:
    """Documents that are whole files. `position` as in Lines."""

    position: int
    items: list[Document | Broken]

    def documents(self, keys: tuple[str, ...]) -> Iterator[Document | Broken]:
        return iter(self.items)


def find_sources(patterns: list[str], kind: str = "auto", txt: str = "file") -> list[InputFile]:
    """Return the inputs that `patterns` (paths, globs and "-" for standard input) name, those of a glob sorted.

    kind: "auto" (by suffix) or "jsonl", "txt". txt: whether a text has a document per "file" or "line". Raises
    UserError, before hours of work, if one does not exist, cannot be opened or is not of a known kind.
    """
    names = [name for pattern in patterns for name in _expand(pattern)]
    if names.count(STDIN) > 1:
        raise UserError("standard input (-) is given twice; it can be read only once")
    sources = []
    for name in names:
        if name.startswith(PREFIX) and not os.path.lexists(name):
            sources.append(InputFile(name, "hub"))
            continue
        head = None if name == STDIN else _head(name)
        found = _kind_of(name) if kind == "auto" else kind
        if found == "parquet":
            check_rules(
                PARQUET_RULES, {"head": head, "begin": (head or b"")[: len(PARQUET)]}, file=InputFile(name, found)
            )
        else:
            check_format(head or b"", name)
        found = "lines" if found == "txt" and txt == "line" else found
        sources.append(InputFile(name, found))
    if txt == "line" and not any(source.kind == "lines" for source in sources):
        raise UserError("--txt line is for texts, and no input is one; leave it out, or add --input-format txt")
    return sources


def check_keys(sources: list[InputFile], keys: tuple[str, ...]) -> None:
    """Raise UserError if several keys are asked for and an input is a text, which has none."""
    if len(keys) > 1 and any(source.kind in ("txt", "lines") for source in sources):
        raise UserError(f"a text has no keys {' '.join(keys)}; give one, as in --json-keys text")


def total_bytes(sources: list[InputFile]) -> int | None:
    """Return the bytes of all inputs on disk; None where one of them is a pipe."""
    if not all(os.path.isfile(source.path) for source in sources):
        return None
    return sum(os.path.getsize(source.path) for source in sources)


def read_blocks(sources: list[InputFile], keys: tuple[str, ...]) -> Iterator[Lines | Parsed]:
    """Yield all inputs in order. keys: the fields that are looked at, and the only columns of Parquet
    files that are read; none: all. Raises UserError if an input cannot be read to its end."""
    before, size = 0, 0
    items: list[Document | Broken] = []
    for source in sources:
        if items and source.kind != "txt":
            yield Parsed(before, items)
            items, size = [], 0
        if source.kind == "parquet":
            for first, data in whole_lines(source, row_pieces(source.path, keys)):
                yield Lines(before, source, first, data)
            before += os.path.getsize(source.path)
            continue
        if source.kind == "hub":
            from dtgpt.hub.rows import lines  # here: the package takes a second

            for first, data in whole_lines(source, lines(source.path, keys)):
                yield Lines(before, source, first, data)
            continue
        with _opened(source) as raw:
            pieces = decompressed(raw, source.name)
            if source.kind == "txt":
                found = whole_text(source.name, pieces)
                items.append(found if isinstance(found, Broken) else {keys[0]: [found]})
                size += len(found) if isinstance(found, str) else 0
                if size >= BLOCK:  # small files share a block
                    yield Parsed(before + _position(raw), items)
                    items, size = [], 0
            else:
                for first, data in whole_lines(source, pieces):
                    yield Lines(before + _position(raw), source, first, data)
            before += _position(raw)
    if items:
        yield Parsed(before, items)


def _expand(pattern: str) -> list[str]:
    if pattern == STDIN or pattern.startswith(PREFIX) or os.path.lexists(pattern) or not glob.has_magic(pattern):
        return [pattern]
    names = sorted(name for name in glob.glob(pattern, recursive=True) if not os.path.isdir(name))
    if not names:
        raise UserError(f"no file matches the input {pattern}; check the pattern and the folder")
    return names


def _head(name: str) -> bytes | None:
    """Return the first bytes of a file, None of a pipe, which would lose them. Raises UserError for what cannot be
    read."""
    if os.path.isdir(name):
        raise UserError(f"the input {name} is a folder; name its files, as in '{name.rstrip('/')}/*.jsonl'")
    try:
        if not stat.S_ISREG(os.stat(name).st_mode):
            return None
        with open(name, "rb") as file:
            return file.read(HEAD)
    except OSError as error:
        raise UserError(f"the input {name} cannot be read: {error.strerror}; check its path and permissions") from None


def check_not_csv(name: str) -> None:
    """Raise UserError for a table, with the lines that make JSON lines of it."""
    program = UNPACK.get(Path(name).suffix.lower())
    table = Path(name).with_suffix("") if program else Path(name)
    if table.suffix.lower() in TABLES:
        more = ", delimiter='\\t'" if table.suffix.lower() == ".tsv" else ""
        target = shlex.quote(str(table.with_suffix(".jsonl")))
        unpack = f"{program} -dc < {shlex.quote(name)} | " if program else ""
        source = "" if program else f" < {shlex.quote(name)}"
        script = f"import csv, json, sys\n[print(json.dumps(row)) for row in csv.DictReader(sys.stdin{more})]"
        raise UserError(
            f"{name} is a table, which is not read; make JSON lines of it, whose keys are the first row's names:\n"
            f'{unpack}python -c "{script}"{source} > {target}'
        )


def _kind_of(name: str) -> str:
    check_not_csv(name)
    path = Path(name)
    path = path.with_suffix("") if path.suffix.lower() in SUFFIXES else path
    if name == STDIN or (os.path.exists(name) and not os.path.isfile(name)):  # a pipe has no suffix
        return "jsonl"
    if path.suffix.lower() not in KINDS:
        known = ", ".join(KINDS)
        raise UserError(f"the input {name} has none of the suffixes {known}; say what it is with --input-format")
    return KINDS[path.suffix.lower()]


class _Pipe(io.RawIOBase):
    """A pipe or a terminal. Reading returns to Python now and then: a signal that comes while io's own loop reads piece
    after piece, or to another thread, would else wait for more input."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "Buffer") -> int:
        view = memoryview(buffer)
        while not select.select([self._descriptor], [], [], POLL)[0]:
            pass
        data = os.read(self._descriptor, len(view))
        view[: len(data)] = data
        return len(data)


@contextmanager
def _opened(source: InputFile) -> Iterator[io.BufferedReader]:
    with ExitStack() as stack:
        try:
            stdin = cast(io.BufferedReader, sys.stdin.buffer)
            file = stdin if source.path == STDIN else stack.enter_context(open(source.path, "rb"))
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        except io.UnsupportedOperation:  # a standard input that a program put in its place
            regular = True
        except OSError as error:
            raise UserError(f"the input {source.path} cannot be read: {error.strerror}; nothing was written") from None
        yield file if regular else io.BufferedReader(_Pipe(file.fileno()))


def _position(raw: io.BufferedReader) -> int:
    return raw.tell() if raw.seekable() else 0

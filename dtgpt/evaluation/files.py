"""Test data in files: JSON lines or plain text, compressed or not, with a digest of what was read."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dtgpt.data.prepare.compressed import SUFFIXES, decompressed
from dtgpt.data.prepare.documents import present
from dtgpt.data.prepare.inputs import check_not_csv
from dtgpt.data.text import BYTE_ORDER_MARK, paired
from dtgpt.util.console import byte_size
from dtgpt.util.errors import UserError, remedy, shown
from dtgpt.util.storage import open_regular, parse_json

LARGEST = 1 << 30  # bytes of a file, unpacked
JSON = (".jsonl", ".ndjson", ".json")


class DataFile(NamedTuple):
    """What a file holds."""

    path: Path
    kind: Literal["json", "text"]
    text: str  # with "\\n" at the end of each line
    digest: str  # SHA-256 of the bytes, unpacked


class Entry(NamedTuple):
    """An entry of a file, and where it stands, for messages."""

    place: str
    fields: dict[str, Any]

    def field(self, name: str, kind: type, what: str) -> Any:
        """Return a field. Raise UserError where there is none, or it is not `what`, a `kind`."""
        if name not in self.fields:
            known = f", only {', '.join(map(str, self.fields))[:120]}" if self.fields else ""
            raise UserError(f'{self.place} has no "{name}"{known}; give {what} there')
        value = self.fields[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(f'{self.place} has "{name}": {shown(value)}; give {what} there')
        return paired(value) if isinstance(value, str) else value


def read_file(path: Path, source: str) -> DataFile:
    """Return what a file holds, unpacked where it is compressed. `source`: a sentence that says where to get such a
    file. Raise UserError where there is none, or it cannot be read."""
    content = bytearray()
    try:
        with open_regular(path) as file:
            for piece in decompressed(file, str(path)):
                content += piece
                if len(content) > LARGEST:
                    raise UserError(f"{path} has more than {byte_size(LARGEST)}, unpacked; give a part of it")
    except OSError as error:
        raise UserError(
            f"the data {path} cannot be read ({error.strerror or error}); {remedy(error, source)}"
        ) from None
    digest = hashlib.sha256(content).hexdigest()
    try:
        text = content.removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line} is not UTF-8; convert the file with iconv -f ENCODING -t UTF-8") from None
    if not text.strip():
        raise UserError(f"the data {path} is empty; {source}")
    return DataFile(path, _kind_of(path), text.replace("\r\n", "\n"), digest)


def _kind_of(path: Path) -> Literal["json", "text"]:
    check_not_csv(str(path))
    name = path.with_suffix("") if path.suffix.lower() in SUFFIXES else path
    return "json" if name.suffix.lower() in JSON else "text"


def json_records(file: DataFile) -> Iterator[Entry]:
    """Yield the objects of JSON lines, or of one array. Raise UserError for anything else."""
    is_array = file.text.lstrip().startswith("[")
    for place, value in _json_array(file) if is_array else _json_lines(file):
        if not isinstance(value, dict):
            raise UserError(f"{place} is {shown(value)}, not a JSON object; write an object in each line")
        yield Entry(place, present(value.items()))


def _json_array(file: DataFile) -> Iterator[tuple[str, Any]]:
    for number, value in enumerate(_parse(str(file.path), file.text), 1):
        yield f"{file.path}, entry {number}", value


def _json_lines(file: DataFile) -> Iterator[tuple[str, Any]]:
    for place, line in lines_of(file):
        yield place, _parse(place, line)


def _parse(place: str, text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')}, character {error.pos + 1}"
        raise UserError(f"{place} is not JSON ({reason}); write an object in each line") from None


def lines_of(file: DataFile) -> Iterator[tuple[str, str]]:
    """Yield where it stands, and the text, of each line that is not blank."""
    for number, line in enumerate(file.text.split("\n"), 1):
        if line.strip():
            yield f"{file.path}, line {number}", line

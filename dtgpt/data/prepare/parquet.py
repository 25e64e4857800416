"""Parquet files as streams of JSON lines, read by pyarrow, a few rows at a time: each may be of the size of a file."""

import json
from collections.abc import Iterator
from typing import Any

from dtgpt.util.errors import UserError
from dtgpt.util.shared.optional import optional_package

ROWS = 8  # that are held together
READ = 1 << 18  # bytes of a column that are read at once, and not all of it


def row_pieces(path: str, columns: tuple[str, ...]) -> Iterator[bytes]:
    """Yield the rows of a Parquet file as lines of JSON, in pieces. Bytes are texts, if they are UTF-8; what is not a
    value of JSON otherwise, such as a date, is null. Columns that are not in `columns` are null, too, unless it is
    empty. Raises UserError."""
    parquet = optional_package("pyarrow", f"{path}, a Parquet file,", "pyarrow.parquet", "parquet")
    try:
        with parquet.ParquetFile(path, buffer_size=READ, pre_buffer=False) as file:
            yield from _rows(file, path, columns)
    except MemoryError:
        raise UserError(f"{path} has rows or pages that do not fit into memory; write it with smaller ones") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply; write it as JSON lines") from None
    except (OSError, ValueError, NotImplementedError, TypeError) as error:  # pyarrow's errors are of these types
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path} is not a Parquet file that can be read ({reason}); fetch it again") from None


def _rows(file: Any, path: str, wanted: tuple[str, ...]) -> Iterator[bytes]:
    names = file.schema_arrow.names
    columns = [name for name in names if name in wanted or not wanted]
    if not columns:
        found, asked = (", ".join(map(repr, some))[:200] for some in (names[:10], wanted))
        raise UserError(f"{path} has the columns {found}, and none is {asked}; give one of them this name")
    for batch in file.iter_batches(ROWS, columns=columns, use_threads=False):
        for number in range(batch.num_rows):
            values = {name: _value(column[number]) for name, column in zip(batch.schema.names, batch, strict=True)}
            yield json.dumps(dict.fromkeys(names) | values, default=_text_of).encode() + b"\n"


def _value(scalar: Any) -> Any:
    """Return a value, None for one that Python cannot hold: a text that is not UTF-8, a time after the year 9999."""
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        return None


def _text_of(value: Any) -> str | None:
    """Return the text of bytes: many writers of Parquet do not mark them as texts. None of all else."""
    try:
        return value.decode() if isinstance(value, bytes) else None
    except UnicodeDecodeError:
        return None

"""A program that writes rows of a Parquet file as lines of JSON, started by `parquet.row_pieces`; it imports nothing of
dtgpt.

A page of a few bytes can stand for any number of values, and what a header says need not be true. So the library that
reads them has a process of its own, whose memory is limited, and which may as well crash.

Arguments: bytes of memory, the file, and the names of the columns that are wanted, all where there are none. Others are
null. What goes wrong is one line on standard error; the exit code is TOO_LARGE where the memory does not suffice.
"""

import json
import os
import resource
import sys
from typing import Any

import pyarrow
from pyarrow import parquet

TOO_LARGE = 3  # exit code; `parquet.py` has it too
ROWS = 8  # that are held together: each may be of the size of a whole file
READ = 1 << 18  # bytes of a column that are read at once, and not all of it
PIECE = 1 << 18  # bytes of lines that are written together


def write_rows(path: str, wanted: list[str], descriptor: int) -> None:
    """Write the rows of a file. Raises the errors of pyarrow, and KeyError where the file has no column of `wanted`."""
    file = parquet.ParquetFile(path, buffer_size=READ, pre_buffer=False)
    names = file.schema_arrow.names
    columns = [name for name in names if name in wanted or not wanted]
    if not columns:
        found, asked = (", ".join(map(repr, some))[:200] for some in (names[:10], wanted))
        raise KeyError(f"has the columns {found}, and none is {asked}")
    with os.fdopen(descriptor, "wb", PIECE) as output:
        for batch in file.iter_batches(ROWS, columns=columns, use_threads=False):
            for number in range(batch.num_rows):
                values = {name: _value(column[number]) for name, column in zip(batch.schema.names, batch, strict=True)}
                row = dict.fromkeys(names) | values
                output.write(json.dumps(row, default=_text_of).encode() + b"\n")


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


def main() -> int:
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # others reserve addresses that they do not use
    memory, path, *wanted = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))  # of addresses
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        write_rows(path, wanted, sys.stdout.fileno())
        return 0
    except BrokenPipeError:  # the reader is gone
        return 1
    except MemoryError:
        return TOO_LARGE
    except KeyError as error:
        reason = f"{error.args[0]}; give one of them this name"
    except RecursionError:
        reason = "is nested too deeply; write it as JSON lines"
    except (OSError, ValueError, NotImplementedError, TypeError) as error:  # pyarrow's errors are of these types
        reason = f"is not a Parquet file that can be read ({' '.join(str(error).split())[:300]}); fetch it again"
    sys.stderr.write(reason)
    return 1


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    sys.stderr.flush()
    os._exit(code)  # without the clean-up of C++ libraries, which may wait or crash

"""Parquet files as streams of JSON lines, read in a process of its own."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from io import BufferedReader
from pathlib import Path

from dtgpt.data.prepare.compressed import PIECE
from dtgpt.util.errors import UserError
from dtgpt.util.shared.optional import optional_package

PROGRAM = Path(__file__).with_name("parquet_rows.py")
MEMORY = 4 << 30  # bytes that it may take
TOO_LARGE = 3  # its exit code where these do not suffice, if pyarrow raises an error of Python for it
BAD_ALLOC = "std::bad_alloc"  # in the last line of a process that pyarrow ends for it instead


def row_pieces(path: str, columns: tuple[str, ...]) -> Iterator[bytes]:
    """Yield the rows of a Parquet file as lines of JSON, in pieces. Bytes are texts, if they are UTF-8; what is not a
    value of JSON otherwise, such as a date, is null. Columns that are not in `columns` are null, too, unless it is
    empty. Raises UserError."""
    optional_package("pyarrow", f"{path}, a Parquet file,", "pyarrow.parquet", "parquet")
    with subprocess.Popen(
        [sys.executable, "-P", str(PROGRAM), str(MEMORY), path, *columns],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # ^C in a terminal is not for it
    ) as process:
        assert isinstance(process.stdout, BufferedReader) and process.stderr is not None
        try:
            yield from iter(partial(process.stdout.read1, PIECE), b"")
            reason = process.stderr.read().decode(errors="replace")
            code = process.wait()
        finally:
            process.kill()
    if code == TOO_LARGE or (code == -signal.SIGABRT and BAD_ALLOC in reason):
        raise UserError(
            f"{path} has rows or pages that take more than {MEMORY >> 30} GiB of memory; write it with smaller ones"
        )
    if code < 0:
        raise UserError(
            f"{path} ended the process that reads it ({signal.Signals(-code).name}), as a damaged file does, or one "
            "that takes all memory; fetch it again, or write it as JSON lines"
        )
    if code:
        raise UserError(f"{path} {reason}")

"""Data sets of the Hub as JSON lines, by the package datasets (extra `datasets`), from its cache where they are there.
Its settings hold: HF_HOME, HF_HUB_OFFLINE, HF_TOKEN. Nothing that a data set has is executed: the package does not do
that from version 4 on, and older ones are refused."""

import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from dtgpt.hub.names import PREFIX, REPOSITORY, REVISION
from dtgpt.util.errors import UserError, shown
from dtgpt.util.shared.optional import optional_package

NAME = re.compile(
    rf"(?P<repository>{REPOSITORY.pattern})(@(?P<revision>{REVISION.pattern}))?"
    r"((:(?P<config>[\w.-]{1,200}))?:(?P<split>[\w.]{1,100}(\[[\d%:-]{1,40}\])?))?"
)
FORM = "write hf:ORG/NAME, hf:ORG/NAME:SPLIT or hf:ORG/NAME:CONFIG:SPLIT, with @REVISION behind the name or without"
ROWS = 256  # that become lines together
OLDEST = 4  # version of the package


def lines(name: str, columns: tuple[str, ...]) -> Iterator[bytes]:
    """Yield the rows of a data set as lines of JSON, in pieces. columns: those that are wanted; none: all. What is not
    a value of JSON, such as a date or an image, is null. Raises UserError."""
    found = opened(name)
    wanted = [column for column in found.column_names if column in columns or not columns]
    if not wanted:
        has, asked = (", ".join(map(repr, some))[:200] for some in (found.column_names[:10], columns))
        raise UserError(f"{name} has the columns {has}, and none is {asked}; give one of them this name")
    for table in found.select_columns(wanted).with_format("arrow").iter(batch_size=ROWS):
        yield b"".join(json.dumps(row, default=_text_of).encode() + b"\n" for row in table.to_pylist())


def texts(name: str, key: str) -> Iterator[str]:
    """Yield the texts in a column of a data set, or in lists there. Raises UserError."""
    for piece in lines(name, (key,)):
        for number, line in enumerate(piece.splitlines(), 1):
            value = json.loads(line)[key]
            pieces = value if isinstance(value, list) else [value]
            if not all(isinstance(each, str) for each in pieces):
                raise UserError(f"{name}: row {number} has {shown(value)} as {key}, which is no text; give another key")
            yield from pieces


def opened(name: str) -> Any:
    """Return a split of a data set, fetched into the cache where it is not there. Raises UserError."""
    parts = NAME.fullmatch(name.removeprefix(PREFIX))
    if parts is None:
        raise UserError(f"{shown(name)} names no data set of the Hub; {FORM}")
    datasets = optional_package("datasets", name, extra="datasets")
    if int(version("datasets").partition(".")[0]) < OLDEST:
        raise UserError(f"{name} needs datasets {OLDEST} or newer; run pip install -U 'dtgpt[datasets]'")
    split = parts["split"] or "train"
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        return datasets.load_dataset(parts["repository"], parts["config"], split=split, revision=parts["revision"])
    except ValueError as error:  # of a split or a config
        raise UserError(f"{name}: {_first_line(error)}; {FORM}") from None
    except Exception as error:  # its ways through the network raise what they like
        raise UserError(
            f"{name} could not be fetched ({_first_line(error)}); correct the name, run hf auth login, or fetch it "
            f"where there is a network: python -c \"import datasets; datasets.load_dataset('{parts['repository']}')\""
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300].rstrip(".") or type(error).__name__


def _text_of(value: Any) -> str | None:
    """Return the text of bytes, None of all else that is no value of JSON."""
    try:
        return value.decode() if isinstance(value, bytes) else None
    except UnicodeDecodeError:
        return None

"""`hf:ORG/NAME[@REVISION]`, which names a model of the Hub. What it needs of the package huggingface_hub (extra `hub`)
is in other modules of this folder, since every command asks here whether a word is such a name."""

import re
from importlib.util import find_spec
from pathlib import Path

from dtgpt.util.errors import UserError, shown

PREFIX = "hf:"
PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
REPOSITORY = re.compile(rf"({PART}/)?{PART}")
REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,199}")


def place(name: str, weights: bool = True) -> Path | None:
    """Return the folder of a model of the Hub, fetched into the cache where it is not there, without its weights where
    these are not wanted; None for other names. Raises UserError."""
    if not name.startswith(PREFIX):
        return None
    repository, at, revision = name.removeprefix(PREFIX).partition("@")
    if not REPOSITORY.fullmatch(repository) or (at and not REVISION.fullmatch(revision)):
        raise UserError(f"{shown(name)} names no model of the Hub; write hf:ORG/NAME, or hf:ORG/NAME@REVISION")
    need_library(name)
    from dtgpt.hub.fetch import fetched

    return fetched(repository, revision or None, weights)


def need_library(asked: str) -> None:
    """Raise UserError where the package is missing that what is `asked` needs."""
    if find_spec("huggingface_hub") is None:
        raise UserError(f"{asked} needs the package huggingface_hub; run pip install 'dtgpt[hub]'")

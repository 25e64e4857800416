"""nanoGPT's meta.pkl, which says which character each token of its character data is (data/shakespeare_char of it).

A pickle may call any function. So only those instructions are let through that build dictionaries, lists, texts and
numbers, before anything is built.
"""

import pickle
import pickletools
from pathlib import Path
from typing import Any

from dtgpt.errors import UserError, shown
from dtgpt.storage import read_regular
from dtgpt.tokenizers.char import Char
from dtgpt.tokenizers.tokenizer import MOST

LARGEST = 1 << 26  # bytes
PLAIN = {
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG1",
    "LONG", "BINFLOAT", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS",
    "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET",
    "LONG_BINGET",
}  # fmt: skip
STORES = {"PUT", "BINPUT", "LONG_BINPUT"}  # of which Python makes room for all smaller numbers, too


def read_meta(path: Path) -> Char | None:
    """The tokenizer that a meta.pkl describes; None where it names no characters, as that of other data may. Raises
    UserError where it is damaged or holds anything that would be run."""
    remedy = "copy or make it again, or remove it and give --data.tokenizer ids (losses without bits/byte and samples)"
    try:
        meta = _plain_value(read_regular(path, LARGEST))
        if not isinstance(meta, dict):
            raise ValueError(f"it holds a {type(meta).__name__}, not a dictionary")
        return _char(meta) if "stoi" in meta else None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); {remedy}") from None
    except Exception as error:  # a damaged pickle can make the reader raise anything
        raise UserError(f"{path} is not nanoGPT's ({str(error)[:200]}); {remedy}") from None


def _plain_value(content: bytes) -> Any:
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name not in PLAIN or (opcode.name in STORES and (argument or 0) > len(content)):
            raise ValueError(f"its instruction {opcode.name} is not opened, because it could run code")
    return pickle.loads(content)


def _char(meta: dict) -> Char:
    ids, size = meta["stoi"], meta.get("vocab_size")
    if not isinstance(ids, dict) or not ids:
        raise ValueError("its stoi is not a dictionary of characters and their ids")
    for character, i in ids.items():
        if not isinstance(character, str) or len(character) != 1 or type(i) is not int or not 0 <= i < MOST:
            raise ValueError(f"its stoi holds {shown(character)}: {shown(i)}, not a character and its id")
    names = {i: character for character, i in ids.items()}
    if len(names) < len(ids):
        raise ValueError("its stoi gives an id to two characters")
    if meta.get("itos", names) != names:
        raise ValueError("its stoi and itos do not agree")
    largest = max(names)
    if size is not None and (type(size) is not int or not largest < size <= MOST):
        raise ValueError(f"its vocab_size is {shown(size)}, its largest id {largest}")
    return Char([names.get(i, "") for i in range(size or largest + 1)])

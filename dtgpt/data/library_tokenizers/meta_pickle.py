"""nanoGPT's meta.pkl, which says which character of a text each token is."""

from io import BytesIO
from pathlib import Path

from dtgpt.data.tokenizers.char import Char, NoCharacters
from dtgpt.data.tokenizers.tokenizer import MOST
from dtgpt.util.errors import UserError, shown
from dtgpt.util.storage import read_regular


def read_meta(path: Path) -> Char:
    """Return the tokenizer that a meta.pkl describes. Raise NoCharacters where it names none, as that of other data
    may, and UserError where it is damaged. Nothing in it is run."""
    from dtgpt.util.unpickler import read_pickle  # imports torch, which prepares no data otherwise

    remedy = "copy or make it again, or remove it and give --data.tokenizer ids (losses without bits/byte and samples)"
    try:
        meta = read_pickle(BytesIO(read_regular(path)))
        if not isinstance(meta, dict):
            raise ValueError(f"it holds {shown(meta)}, not a dictionary")
        if "stoi" not in meta:
            raise NoCharacters(f"{path} names no characters (it has no stoi); give another tokenizer")
        return _char(meta)
    except NoCharacters:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); {remedy}") from None
    except Exception as error:  # a damaged pickle can make the reader raise anything
        raise UserError(f"{path} is not nanoGPT's ({str(error)[:200]}); {remedy}") from None


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

"""nanoGPT's meta.pkl, which says which character of a text each token is."""

from io import BytesIO
from pathlib import Path

from dtgpt.data.library_tokenizers.characters import Char, NoCharacters
from dtgpt.data.tokenizers.tokenizer import MOST
from dtgpt.util.errors import UserError, shown
from dtgpt.util.storage import read_regular


def read_meta(path: Path) -> Char:
    """Return the tokenizer that a meta.pkl describes. Raise NoCharacters where it names none, as that of other data
    may, and UserError where it is damaged. Nothing in it is run."""
    from dtgpt.data.library_tokenizers.unpickler import read_pickle  # imports torch, which prepares no data otherwise

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
    if (problem := _problem(meta)) is not None:
        raise ValueError(problem)
    names = {i: character for character, i in meta["stoi"].items()}
    return Char([names.get(i, "") for i in range(meta.get("vocab_size") or max(names) + 1)])


def _problem(meta: dict) -> str | None:
    """Return what is wrong with a meta.pkl, None where it is whole."""
    ids, size = meta["stoi"], meta.get("vocab_size")
    if not isinstance(ids, dict) or not ids:
        return "its stoi is not a dictionary of characters and their ids"
    for character, i in ids.items():
        if not isinstance(character, str) or len(character) != 1 or type(i) is not int or not 0 <= i < MOST:
            return f"its stoi holds {shown(character)}: {shown(i)}, not a character and its id"
    names, largest = {i: character for character, i in ids.items()}, max(ids.values())
    if len(names) < len(ids):
        return "its stoi gives an id to two characters"
    if meta.get("itos", names) != names:
        return "its stoi and itos do not agree"
    if size is not None and (type(size) is not int or not largest < size <= MOST):
        return f"its vocab_size is {shown(size)}, its largest id {largest}"
    return None

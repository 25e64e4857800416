"""A tokenizer by what the user names: plain bytes, a file that a run or `dtgpt tokenizer train` wrote, or what a
capability knows.

The core has one kind, which needs no library. Vocabularies, and whatever learns one, come from the formats that
capabilities list as `tokenizers`, asked in their order."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dtgpt.data.tokenizers.tokenizer import CHECKSUM, Bytes, Tokenizer, checksum
from dtgpt.util import seams
from dtgpt.util.errors import UserError
from dtgpt.util.storage import read_json

FILES = "a tokenizer.json, a SentencePiece or tiktoken file, or vocab.json and merges.txt"  # which a user may give
OTHERS = re.compile(rb'\s*\{\s*"version"')  # how other libraries' files begin: no name that `Tokenizer.save` writes
LARGEST = 1 << 28  # bytes of a vocabulary's file


class TokenizerFormat:
    """Tokenizers of a capability. What reads files is to be imported by the methods: to ask is cheap."""

    def names(self) -> list[str]:
        """Return the names by which a user may call tokenizers of this format, which `make` takes."""
        return []

    def is_called(self, name: str) -> bool:
        """Return whether `make` takes a name, one of `names` or of a form of its own."""
        return name in self.names()

    def make(self, name: str) -> Tokenizer:
        """Return the tokenizer of a name. Raise UserError where it cannot be made."""
        raise NotImplementedError

    def takes(self, path: Path) -> bool:
        """Return whether `path`, a file or a folder that is there, may hold a tokenizer of this format."""
        return False

    def open(self, path: Path, begin: bool) -> Tokenizer:
        """Return the tokenizer at `path`, of which `takes` is true. begin: texts open with its begin of text, where the
        files do not say so themselves. Raise UserError where the files are damaged."""
        raise NotImplementedError

    def open_pair(self, vocab: Path, merges: Path) -> Tokenizer | None:
        """Return the BPE of two files, its tokens and its merges; None where this format has no such pair."""
        return None

    def file_in(self, folder: Path) -> Path | None:
        """Return the file in `folder` that holds a tokenizer; None where there is none."""
        return None

    def add(self, tokenizer: Tokenizer, file: Path) -> None:
        """Add to `tokenizer`, which stands in `file`, what other files beside that say of it."""


def formats() -> list[TokenizerFormat]:
    """Return the formats of capabilities."""
    return seams.listed("tokenizers")


def open_tokenizer(
    name: str = "gpt2", vocab_file: str | None = None, merge_file: str | None = None, begin: bool = False
) -> Tokenizer:
    """Open the tokenizer `name`: "bytes", a file or a folder with one, or a name that a format knows ("gpt2", ...); or
    the BPE of two files. begin: texts open with a begin of text, where the files do not say so themselves. Raises
    UserError if a file cannot be read or is of another kind, or a vocabulary is not at hand."""
    check_named_once(name, vocab_file, merge_file)
    if vocab_file is not None and merge_file is not None:
        return _of_pair(Path(vocab_file), Path(merge_file))
    if name == "bytes":
        return Bytes()
    path = Path(name)
    if path.exists():
        return _of_path(path, begin)
    known = ["bytes"]
    for form in formats():
        if form.is_called(name):
            return form.make(name)
        known += form.names()
    raise UserError(f"the tokenizer {name} is neither a file nor one of {', '.join(known)}; give {FILES}")


def _of_pair(vocab: Path, merges: Path) -> Tokenizer:
    if (tokenizer := seams.ask("tokenizers", lambda form: form.open_pair(vocab, merges))) is None:
        raise UserError(f"nothing here reads {vocab} and {merges}; give what dtgpt tokenizer train wrote")
    return tokenizer


def _of_path(path: Path, begin: bool) -> Tokenizer:
    file = path / "tokenizer.json" if path.is_dir() else path
    # Before the formats, of which one takes every file.
    if _is_saved(file):
        tokenizer = read_saved(file, remedy="make it again with dtgpt tokenizer train, or copy it from its run")
        for form in formats():
            form.add(tokenizer, file)
        return tokenizer
    theirs = next((form for form in formats() if form.takes(path)), None)
    if theirs is None:
        raise UserError(f"{path} is not a tokenizer; give what dtgpt tokenizer train wrote")
    return theirs.open(path, begin)


def _is_saved(file: Path) -> bool:
    """Return whether `Tokenizer.save` wrote a file; False, too, where the file cannot be read: who reads it says so."""
    if file.suffix != ".json" or not file.is_file():
        return False
    try:
        with file.open("rb") as opened:
            if OTHERS.match(opened.read(100)):  # a large one takes seconds to parse
                return False
        saved = read_json(file, "", LARGEST)
    except (OSError, UserError):
        return False
    return isinstance(saved, dict) and not saved.keys().isdisjoint({"bytes", *seams.added("saved_tokenizers")})


def tokenizer_file(folder: Path) -> Path | None:
    """Return the file in `folder` that holds a tokenizer; None where there is none."""
    own = folder / "tokenizer.json"
    return own if own.is_file() else seams.ask("tokenizers", lambda form: form.file_in(folder))


def check_named_once(name: str, vocab_file: str | None, merge_file: str | None) -> None:
    """Raise UserError if one of the two files is missing, or they are given with the name of another tokenizer."""
    if (vocab_file is None) != (merge_file is None):
        raise UserError("the vocab file and the merge file belong together; give both, vocab.json and merges.txt")
    if vocab_file is not None and name != "gpt2":
        raise UserError(f"the tokenizer {name} and the vocab file {vocab_file} are both given; leave one out")


def makes(kind: str) -> bool:
    """Return whether `make_tokenizer` knows the kind."""
    return kind == "bytes" or kind in seams.added("tokenizer_kinds")


def make_tokenizer(kind: str, documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Make the tokenizer `kind`: "bytes"; or what a capability makes, such as "bpe", which learns `vocab_size` tokens
    of the documents, and "gpt2". Raises UserError if it cannot be made."""
    if kind == "bytes":
        return Bytes()
    if not makes(kind):
        raise UserError(f"nothing here makes the tokenizer {kind}; use bytes")
    return seams.load(seams.added("tokenizer_kinds")[kind])(kind, documents, vocab_size)


def read_saved(path: Path, remedy: str) -> Tokenizer:
    """Return what `Tokenizer.save` wrote. Raise UserError, with `remedy`, where the file is not that, was changed
    since, or a package is missing."""
    saved = read_json(path, remedy, LARGEST)
    try:
        if CHECKSUM in saved and saved.pop(CHECKSUM) != checksum(saved):  # older runs have none
            raise ValueError("its content is not what was written")
        tokenizer = _from_json(saved)
        own = tokenizer.to_json()
        tokenizer.additions = {name: value for name, value in saved.items() if name not in own}
        return tokenizer
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {error}); {remedy}") from None


def _from_json(saved: dict[str, Any]) -> Tokenizer:
    if "bytes" in saved:
        return Bytes()
    parts = [part for field, part in seams.added("saved_tokenizers").items() if field in saved]
    if not parts:
        raise ValueError("it is of no tokenizer that is known here")
    return seams.load(parts[0])(saved)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer that the run in this folder was trained with."""
    return read_saved(folder / "tokenizer.json", remedy="copy it from another run on the same data")

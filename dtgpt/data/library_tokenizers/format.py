"""Files of other libraries' tokenizers, as the core asks for them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dtgpt.data.tokenizers.open import TokenizerFormat
from dtgpt.data.tokenizers.tokenizer import Tokenizer


class LibraryFiles(TokenizerFormat):
    """Those of Hugging Face, SentencePiece, tiktoken and nanoGPT. Most are known by what they hold, hence this format
    takes every file, and stands behind all others."""

    def takes(self, path: Path) -> bool:
        return True

    def open(self, path: Path, begin: bool) -> Tokenizer:
        from dtgpt.data.library_tokenizers.files import open_path

        tokenizer = open_path(path, begin)
        file = self.file_in(path) if path.is_dir() else path
        if file is not None:
            self.add(tokenizer, file)
        return tokenizer

    def open_pair(self, vocab: Path, merges: Path) -> Tokenizer:
        from dtgpt.data.library_tokenizers.files import from_files

        return from_files(vocab, merges)

    def names(self) -> list[str]:
        from dtgpt.data.library_tokenizers.byte_level import encoding_names

        return encoding_names()

    def make(self, name: str) -> Tokenizer:
        return make(name, [], 0)

    def file_in(self, folder: Path) -> Path | None:
        from dtgpt.data.library_tokenizers.folder import tokenizer_file

        return tokenizer_file(folder)

    def add(self, tokenizer: Tokenizer, file: Path) -> None:
        """Add the chat template that files beside `file` have, unless the tokenizer has one."""
        from dtgpt.data.library_tokenizers.chat_template import keep_template, template_of
        from dtgpt.data.library_tokenizers.folder import template_beside

        if template_of(tokenizer) is None:
            keep_template(tokenizer, template_beside(file))


LIBRARY_FILES = LibraryFiles()


def make(kind: str, documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return the tokenizer "bpe", which learns at most `vocab_size` tokens of the documents, "char", which has their
    characters, or that of tiktoken which has this name. Raise UserError where it cannot be made."""
    if kind == "char":
        from dtgpt.data.library_tokenizers.characters import Char

        return Char.of_texts(documents)
    from dtgpt.data.library_tokenizers.byte_level import PATTERN, ByteLevel, from_tiktoken, train_ranks

    return from_tiktoken(kind) if kind != "bpe" else ByteLevel("bpe", PATTERN, train_ranks(documents, vocab_size))


def from_json(saved: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of which `to_json` wrote this. Raise UserError, ValueError, KeyError or TypeError where it
    is damaged."""
    if "characters" in saved:
        from dtgpt.data.library_tokenizers.characters import Char

        return Char(saved["characters"])
    if "ranks" in saved:
        from dtgpt.data.library_tokenizers.byte_level import ByteLevel

        return ByteLevel.from_json(saved)
    from dtgpt.data.library_tokenizers import libraries

    return libraries.from_json(saved)

"""The tokenizer of token files: the one that the recipe names, or the one saved in their folder.

`dtgpt prepare` writes `PREFIX.tokenizer.json` next to `PREFIX.bin` and `.idx`, and nanoGPT `meta.pkl` next to the
`train.bin` of character data. Where neither is there, the recipe has to name the tokenizer.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dtgpt.data.library_tokenizers.characters import Char, NoCharacters
from dtgpt.data.megatron.ids import Ids
from dtgpt.data.megatron.paths import idx_path, tokenizer_path
from dtgpt.data.megatron.token_shards import shard_paths
from dtgpt.data.tokenizers.open import open_tokenizer, read_saved
from dtgpt.data.tokenizers.tokenizer import Tokenizer, check_opening
from dtgpt.util.errors import UserError

if TYPE_CHECKING:
    from dtgpt.config.sections import DataConfig

GPT2_TOKENS = 50257


def tokenizer_of(data: "DataConfig", prefixes: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return the tokenizer of the datasets `prefixes` (shards by their files), for a model of `vocab_size` tokens.
    Raises UserError if it is unknown, or if the recipe names another one than the files."""
    if data.tokenizer == "ids":
        return Ids(vocab_size)
    named, saved = _named(data), tokenizer_beside(prefixes)
    if data.tokenizer == "char" and (saved is None or not isinstance(saved[1], Char)):
        raise UserError(
            f"data.tokenizer=char, but nothing beside {data.path} says which character each token is; copy nanoGPT's "
            "meta.pkl there, or use --data.tokenizer ids, which needs none"
        )
    if named and saved and not named[1].is_same(saved[1]):
        raise UserError(
            f"{named[0]} is not the tokenizer that {saved[0]} says {data.path} is of ({saved[1].name}, "
            f"{saved[1].vocab_size} tokens); leave it out to take that one, or use --data.tokenizer ids for none"
        )
    tokenizer = named[1] if named else saved[1] if saved else _guessed(data, vocab_size)
    check_opening(tokenizer)
    return tokenizer


def tokenizer_beside(prefixes: Iterable[str]) -> tuple[Path, Tokenizer] | None:
    """Return the file next to the datasets that holds their tokenizer, and the tokenizer. Raises UserError if one is
    damaged or two of them differ."""
    found: list[tuple[Path, Tokenizer]] = []
    for path in dict.fromkeys(path for prefix in prefixes for path in _files_beside(prefix)):
        try:
            tokenizer = _read(path)
        except NoCharacters:  # nanoGPT's of data that are no characters
            continue
        if found and not tokenizer.is_same(found[0][1]):
            raise UserError(
                f"{found[0][0]} and {path} are different tokenizers, so one model cannot be trained on both; prepare "
                "both datasets with the same one"
            )
        found.append((path, tokenizer))
    return found[0] if found else None


def _read(path: Path) -> Tokenizer:
    if path.name == "meta.pkl":
        return open_tokenizer(str(path))
    return read_saved(path, remedy="prepare the data again, or remove it and name the tokenizer")


def _files_beside(prefix: str) -> list[Path]:
    if os.path.isfile(idx_path(prefix)):  # which, unlike Path.is_file, takes names too long for a file
        paths = [tokenizer_path(prefix)]
    else:
        paths = [folder / "meta.pkl" for folder in sorted({Path(shard).parent for shard in shard_paths(prefix)})]
    return [path for path in paths if os.path.lexists(path)]


def _named(data: "DataConfig") -> tuple[str, Tokenizer] | None:
    """Return the option that names a tokenizer, and the tokenizer."""
    if data.tokenizer_file is not None:
        return f"data.tokenizer_file={data.tokenizer_file}", open_tokenizer(data.tokenizer_file)
    if data.vocab_file is not None:
        files = data.vocab_file, data.merge_file
        return f"data.vocab_file={data.vocab_file}", open_tokenizer("gpt2", *files)
    if data.tokenizer in ("gpt2", "bytes"):
        return f"data.tokenizer={data.tokenizer}", open_tokenizer(data.tokenizer)
    if data.tokenizer == "bpe":
        raise UserError(
            f"data.tokenizer=bpe is trained on plain text, but {data.path} holds tokens; leave it out, or give the "
            "file of the tokenizer as --data.tokenizer_file"
        )
    return None


def _guessed(data: "DataConfig", vocab_size: int) -> Tokenizer:
    """Return GPT-2's if the model has as many tokens. Raises UserError."""
    if vocab_size >= GPT2_TOKENS:
        return open_tokenizer("gpt2")
    raise UserError(
        f"{data.path} holds tokens of an unknown tokenizer; give the file that dtgpt prepare --tokenizer "
        "took as --data.tokenizer_file, or --data.tokenizer gpt2 (or bytes, where each token is a byte of text), or "
        "ids for losses without bits/byte and samples"
    )

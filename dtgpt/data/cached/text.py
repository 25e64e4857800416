"""Tokens of a text, made once per content and options, and kept in the cache: a text of some gigabytes takes minutes.

The digest of both names the folder, and so does the format of what is in it.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dtgpt.config.sections import DataConfig
from dtgpt.data.cached.folders import load_or_make
from dtgpt.data.dataset import TextTokens
from dtgpt.data.tokenizers.open import read_saved
from dtgpt.data.tokenizers.tokenizer import Tokenizer

FORMAT = 2  # raise when the same settings would give other tokens
FORMER_FORMAT = 1  # with which the digest of a text was that of its settings and documents


def keep_tokens(
    data: DataConfig, documents: list[str], named: Tokenizer | None, cache: Path, make: Callable[[], TextTokens]
) -> TextTokens:
    """Return the tokens of documents from a folder of the cache, into which those that `make` returns are written
    first, unless they are there. named: the tokenizer of `data.tokenizer_file`."""
    settings = {name: getattr(data, name) for name in ("tokenizer", "bpe_vocab_size", "held_out")}
    if data.tokenizer == "gpt2" and data.vocab_file:
        from dtgpt.util.shared.vocabulary_files import read_content

        files = [data.vocab_file, data.merge_file]
        settings["files"] = [hashlib.sha256(read_content(Path(str(file)))).hexdigest() for file in files]
    if named:
        settings["tokenizer_file"] = hashlib.sha256(named.dumps(with_additions=False).encode()).hexdigest()
    content, former = _contents(settings, documents)
    folder = cache / f"text-{content[:16]}"

    def write() -> dict[str, np.ndarray | str]:
        made = make()
        return {"tokenizer.json": made.tokenizer.dumps(), "train": made.train, "valid": made.valid}

    tokens = load_or_make(folder, "the tokens", write)
    known = read_saved(folder / "tokenizer.json", remedy=f"delete {folder}")
    return TextTokens(known, tokens["train"], tokens["valid"], former)


def _contents(settings: dict[str, Any], documents: list[str]) -> list[str]:
    """Return the digests of what decides the tokens of a text, in this format and in the former one."""
    whole = json.dumps(documents)
    texts = (f"[{json.dumps({'format': number, **settings})}, {whole}]" for number in (FORMAT, FORMER_FORMAT))
    return [hashlib.sha256(text.encode()).hexdigest() for text in texts]

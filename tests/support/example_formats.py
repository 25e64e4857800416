"""Formats that only this file knows: weights in a .npz, ids of letters in a .letters, and an alphabet as a tokenizer.

No other file but the test of it names this one: whoever adds a format writes such a file, and a line in
`dtgpt/capabilities.py`.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dtgpt.checkpoint.open import SourceFormat
from dtgpt.config.sections import DataConfig
from dtgpt.data.dataset import Dataset, TextDataset
from dtgpt.data.library_tokenizers.characters import Char
from dtgpt.data.open import DataFormat, DataRequest
from dtgpt.data.tokenizers.open import TokenizerFormat, open_tokenizer
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.shared.foreign import cut
from dtgpt.models.source import Ranges, Source
from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    sources=(f"{__name__}:NPZ",), datasets=(f"{__name__}:LETTERS",), tokenizers=(f"{__name__}:ALPHABET",)
)


class Archive(Source):
    """The parameters of a GPT-2 by their names, and its shape as JSON."""

    def __init__(self, path: Path):
        self._arrays = np.load(path)
        self.config = GPT2Config(**json.loads(str(self._arrays["config"])))

    def read(self, name: str, part: Ranges | None = None) -> Tensor:
        return cut(torch.from_numpy(self._arrays[name]), part)


class Npz(SourceFormat):
    known = "weights in a .npz"

    def takes(self, path: Path) -> bool:
        return path.suffix == ".npz"

    def open(self, path: Path, true_vocab_size: int | None) -> Source:
        return Archive(path)

    def tokenizer_folder(self, path: Path) -> Path | None:
        return path.parent if self.takes(path) else None

    def ends(self, path: Path) -> tuple[str | None, list[int]] | None:
        return ("the .npz", [1]) if self.takes(path) else None


class Letters(DataFormat):
    """Numbers of letters, one byte each, beside their alphabet. The last tenth is for validation."""

    def takes(self, path: str) -> bool:
        return path.endswith(".letters")

    def has_tokenizer(self, data: DataConfig) -> bool:
        return True

    def load(self, data: DataConfig, request: DataRequest) -> Dataset:
        path = Path(str(data.path))
        tokens = np.fromfile(path, np.uint8)
        cut_at = len(tokens) * 9 // 10
        tokenizer, digest = open_tokenizer(str(path.parent)), hashlib.sha256(tokens.tobytes()).hexdigest()
        return TextDataset(tokenizer, tokens[:cut_at], tokens[cut_at:], str(path), digest)


class Alphabet(TokenizerFormat):
    """All characters of a language, in a file of that name."""

    def takes(self, path: Path) -> bool:
        return path.name == "alphabet" or self.file_in(path) is not None

    def open(self, path: Path, begin: bool) -> Tokenizer:
        return Char(list((path / "alphabet" if path.is_dir() else path).read_text()))

    def file_in(self, folder: Path) -> Path | None:
        path = folder / "alphabet"
        return path if path.is_file() else None


NPZ, LETTERS, ALPHABET = Npz(), Letters(), Alphabet()

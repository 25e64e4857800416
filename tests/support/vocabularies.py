"""Vocabularies for tests: GPT-2's, from the repository, and small ones of other libraries."""

import gzip
import json
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "fixtures"


def gpt2_files(folder: Path) -> tuple[Path, Path]:
    """vocab.json and merges.txt, unpacked into `folder`."""
    paths = folder / "vocab.json", folder / "merges.txt"
    for path in paths:
        path.write_bytes(gzip.decompress((DATA / "gpt2" / f"{path.name}.gz").read_bytes()))
    return paths


def sentencepiece_model(folder: Path) -> Path:
    """A model of 300 tokens, with bytes for what it has not seen."""
    sentencepiece = pytest.importorskip("sentencepiece")
    (folder / "text.txt").write_text("".join(f"the quick brown fox number {i} jumps\n" for i in range(300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "sp"), vocab_size=300, model_type="bpe",
        byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    return folder / "sp.model"


def tokenizer_json(folder: Path, bos: bool = False, end: str = "<|endoftext|>", **changes) -> Path:
    """A small byte-level BPE as Hugging Face's package saves it; `bos`: its post-processor opens each text with <s>."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    texts = [f"the quick brown fox number {i} jumps" for i in range(99)]
    tokenizer.train_from_iterator(texts, vocab_size=280, special_tokens=["<s>", end], show_progress=False)
    if bos:
        begin = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer._tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[begin])
    saved = json.loads(tokenizer.to_str())
    saved["model"] |= changes
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    return folder / "tokenizer.json"

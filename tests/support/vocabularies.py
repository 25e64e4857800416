"""Vocabularies for tests: GPT-2's, from the repository, and small ones of other libraries."""

import base64
import gzip
import json
from pathlib import Path

import pytest

from dtgpt.data.library_tokenizers.characters import Char
from dtgpt.data.library_tokenizers.files import from_files
from dtgpt.data.library_tokenizers.libraries import SentencePiece, TokenizerJson
from dtgpt.data.library_tokenizers.sentencepiece_export import sentencepiece_json
from dtgpt.data.tokenizers.open import make_tokenizer, open_tokenizer
from dtgpt.data.tokenizers.tokenizer import Tokenizer

KINDS = ["bytes", "gpt2", "characters", "tokenizer.json", "sentencepiece", "byte fallback"]
DATA = Path(__file__).parents[1] / "fixtures"


def gpt2_files(folder: Path) -> tuple[Path, Path]:
    """vocab.json and merges.txt, unpacked into `folder`."""
    paths = folder / "vocab.json", folder / "merges.txt"
    for path in paths:
        path.write_bytes(gzip.decompress((DATA / "gpt2" / f"{path.name}.gz").read_bytes()))
    return paths


def sentencepiece_model(folder: Path, **options) -> Path:
    """A model of 300 tokens, with bytes for what it has not seen."""
    sentencepiece = pytest.importorskip("sentencepiece")
    (folder / "text.txt").write_text("".join(f"the quick brown fox number {i} jumps\n" for i in range(300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "sp"), vocab_size=300, model_type="bpe",
        byte_fallback=True, minloglevel=2, **options,
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


def normalized(path: Path) -> Path:
    """Let a tokenizer.json bring texts into a normal form, which tiktoken cannot."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "NFC"}}))
    return path


def of_every_kind(folder: Path) -> dict[str, Tokenizer]:
    """A tokenizer of each of `KINDS`; some know few words and a few other characters."""
    pieces = open_tokenizer(str(sentencepiece_model(folder)))
    assert isinstance(pieces, SentencePiece)
    return {
        "bytes": make_tokenizer("bytes", [], 0), "gpt2": from_files(*gpt2_files(folder)),
        "characters": Char(list("the quick fox12é€🎈\n\ufffd ")),
        "tokenizer.json": TokenizerJson("own", tokenizer_json(folder, bos=True).read_text()), "sentencepiece": pieces,
        "byte fallback": TokenizerJson("fallback", sentencepiece_json(pieces)),
    }  # fmt: skip


TEXTS = [f"the quick brown fox number {i} jumps, don't they? Größe 日本\n\n" for i in range(99)]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")


def cut_by_pattern(folder: Path, family: str) -> Path:
    """A tokenizer.json of the kind that Llama 3 or Qwen3 has: byte-level, cut by their pattern, with special tokens
    behind the others; Llama 3's opens each text."""
    tokenizers = pytest.importorskip("tokenizers")
    pre, processors = tokenizers.pre_tokenizers, tokenizers.processors
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=family == "llama3"))
    cut = pre.Split(tokenizers.Regex(LLAMA3 if family == "llama3" else QWEN), "isolated")
    made.pre_tokenizer = pre.Sequence([cut, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    if family == "llama3":
        made.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
        begin = ("<|begin_of_text|>", made.token_to_id("<|begin_of_text|>"))
        template = processors.TemplateProcessing(f"{begin[0]} $A", special_tokens=[begin])
        made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    else:
        made.normalizer = tokenizers.normalizers.NFC()
        made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
        made.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
        made.post_processor = processors.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def rank_file(path: Path) -> list[bytes]:
    """Write a file of tiktoken's ranks; return its tokens by id."""
    tokens = [bytes([b]) for b in range(256)]
    tokens += [b"th", b"the", b" the", b" q", b"qu", b"12", b"123", b"1234", b"abcd", b"\n\n"]
    tokens += [b"e\xcc\x81", "\u00e9".encode()]
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)))
    return tokens

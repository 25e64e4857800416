"""Tokenizers behind one interface, for `dtgpt prepare`: GPT-2's BPE from its two files, Hugging Face's tokenizer.json,
SentencePiece models, tiktoken's encodings, vocabularies that `dtgpt tokenizer train` made, and plain bytes.

Byte-level BPE is encoded by tiktoken, which is several times faster than `tokenizers`; ids are those of the files.
A vocabulary can be pickled, so that workers need not read files again.
"""

import json
from abc import ABC, abstractmethod
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from dtgpt.errors import UserError
from dtgpt.tokenizers.bpe_files import BytePairs, from_merges, read_text
from dtgpt.tokenizers.tokenizer import END_OF_TEXT, PATTERN, Tokenizer

# What ends a document, where nothing else says so.
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
REMEDY = "give --vocab-file and --merge-file, or --tokenizer with bytes or a file: tokenizer.json or a .model"


class Vocabulary(ABC):
    """Text <-> token ids. `vocab_size` counts all ids; `end_of_text` and `begin_of_text` are None where unknown."""

    name: str
    vocab_size: int
    end_of_text: int | None
    begin_of_text: int | None = None

    @abstractmethod
    def encode(self, text: str, special: bool = False) -> np.ndarray:
        """Ids, `[tokens]`. `special`: the names of special tokens stand for these; else they are text as any other."""

    def encode_batch(self, texts: list[str], special: bool = False) -> list[np.ndarray]:
        return [self.encode(text, special) for text in texts]

    @abstractmethod
    def decode(self, ids: Any) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""

    def token_bytes(self) -> np.ndarray | None:
        """How many bytes of text each id stands for, int64 `[vocab_size]`; None where that depends on its place."""
        return None


class ByteLevel(Vocabulary):
    """Byte-level BPE, encoded by tiktoken."""

    def __init__(self, encoding: tiktoken.Encoding, ends: tuple[str, ...] = ENDS, vocab_size: int = 0):
        """`ends`: names of the token that ends a document, the likeliest first; `vocab_size` where ids are unused."""
        specials = {name: encoding.encode_single_token(name) for name in encoding.special_tokens_set}
        self._encoding, self._specials = encoding, encoding.special_tokens_set
        self.name, self.vocab_size = encoding.name, max(encoding.n_vocab, vocab_size)
        self.end_of_text = next((specials[name] for name in ends if name in specials), None)

    def encode(self, text: str, special: bool = False) -> np.ndarray:
        allowed = self._specials if special else frozenset()
        return self._encoding.encode_to_numpy(text, allowed_special=allowed, disallowed_special=())

    def decode(self, ids: Any) -> str:
        return self._encoding.decode(list(map(int, ids)), errors="replace")

    def token_bytes(self) -> np.ndarray:
        sizes = np.zeros(self.vocab_size, np.int64)
        for token in self._encoding.token_byte_values():
            sizes[self._encoding.encode_single_token(token)] = len(token)
        return sizes

    def ranks(self) -> list[bytes]:
        """The bytes of the tokens 0, 1, ... up to the first that is special or missing."""
        specials = {self._encoding.encode_single_token(name) for name in self._specials}
        of_id = {self._encoding.encode_single_token(token): token for token in self._encoding.token_byte_values()}
        return [of_id[i] for i in takewhile(lambda i: i in of_id and i not in specials, count())]


class HuggingFace(Vocabulary):
    """Any tokenizer.json, encoded by the package `tokenizers`."""

    def __init__(self, name: str, content: str, end: str | None = None):
        self._content = content
        self._plain, self._special = (_parse_tokenizer(name, content) for _ in range(2))
        self._plain.encode_special_tokens = True
        self.name = name
        ids = self._plain.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        self.end_of_text = next((ids[token] for token in (end, *ENDS) if token in ids), None)
        self.begin_of_text = next((ids[token] for token in ("<s>", "<|begin_of_text|>", "<bos>") if token in ids), None)

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name not in ("_plain", "_special")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._plain, self._special = (_parse_tokenizer(self.name, self._content) for _ in range(2))
        self._plain.encode_special_tokens = True

    def encode(self, text: str, special: bool = False) -> np.ndarray:
        tokenizer = self._special if special else self._plain
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, ids: Any) -> str:
        return self._plain.decode(list(map(int, ids)), skip_special_tokens=False)


class SentencePiece(Vocabulary):
    """A SentencePiece .model, such as Llama 2's."""

    def __init__(self, name: str, model: bytes):
        self.name = name
        self.__setstate__({"name": name, "_model": model})
        self.vocab_size = self._processor.get_piece_size()
        end, begin = self._processor.eos_id(), self._processor.bos_id()
        self.end_of_text, self.begin_of_text = end if end >= 0 else None, begin if begin >= 0 else None

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_processor"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        try:
            import sentencepiece
        except ImportError:
            raise UserError(
                f"{self.name} needs the package sentencepiece, which is missing; run pip install 'dtgpt[data]'"
            ) from None
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(self._model)
        except RuntimeError:
            raise UserError(f"{self.name} is no SentencePiece model; give the .model file of one") from None

    def encode(self, text: str, special: bool = False) -> np.ndarray:
        if special:
            raise UserError(f"{self.name} is a SentencePiece model, which has no names of special tokens in text; "
                            "leave --encode-special out")  # fmt: skip
        return np.array(self._processor.encode(text, out_type=int), np.uint32)

    def decode(self, ids: Any) -> str:
        return self._processor.decode(list(map(int, ids)))


def load_vocabulary(name: str = "gpt2", vocab_file: str | None = None, merge_file: str | None = None) -> Vocabulary:
    """The tokenizer `name`: "bytes", one of tiktoken's encodings ("gpt2", ...) or a file; or the BPE of two files.

    Raises UserError where a file cannot be read or is none of the kinds, or where an encoding is not at hand.
    """
    if (vocab_file is None) != (merge_file is None):
        raise UserError("--vocab-file and --merge-file belong together; give both, vocab.json and merges.txt")
    if vocab_file is not None:
        return from_files(Path(vocab_file), Path(merge_file))
    if name == "bytes":
        tokens = {bytes([i]): i for i in range(256)}
        return ByteLevel(tiktoken.Encoding("bytes", pat_str=PATTERN, mergeable_ranks=tokens,
                                           special_tokens={END_OF_TEXT: 256}))  # fmt: skip
    path = Path(name)
    if path.is_dir():
        path /= "tokenizer.json"
    if path.exists():
        return _from_file(path)
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(["bytes", *tiktoken.list_encoding_names()])
        raise UserError(f"--tokenizer {name} is no file and none of {known}; {REMEDY}")
    try:
        return ByteLevel(tiktoken.get_encoding(name))
    except Exception as error:  # tiktoken passes on whatever its download raised
        raise UserError(
            f"the vocabulary of {name} is not in tiktoken's cache and could not be fetched ({type(error).__name__}); "
            f"{REMEDY}"
        ) from None


def from_files(vocab: Path, merges: Path) -> Vocabulary:
    """GPT-2's BPE (or another byte-level one with its pre-tokenization) from vocab.json and merges.txt."""
    try:
        ids = json.loads(read_text(vocab))
    except ValueError as error:
        raise UserError(f"{vocab} is no vocabulary ({error}); give GPT-2's vocab.json") from None
    if not isinstance(ids, dict) or not all(isinstance(i, int) for i in ids.values()):
        raise UserError(f"{vocab} is no vocabulary; give GPT-2's vocab.json, one object of token: id")
    pairs = [line.split(" ") for line in read_text(merges).split("\n") if line and not line.startswith("#version")]
    if not all(len(pair) == 2 for pair in pairs):
        wrong = next(" ".join(pair) for pair in pairs if len(pair) != 2)
        raise UserError(f"{merges} holds {wrong[:60]!r}, which is no pair of tokens; give GPT-2's merges.txt")
    end = max(ids.values(), default=-1) + 1
    specials = {END_OF_TEXT: ids.get(END_OF_TEXT, end)}
    byte_pairs = from_merges(ids, pairs, specials)
    if byte_pairs is None:
        return HuggingFace(str(vocab), _as_tokenizer_json(ids, pairs, specials), END_OF_TEXT)
    return _byte_level(vocab.name, byte_pairs, vocab_size=end)


def _byte_level(name: str, pairs: BytePairs, end: str | None = None, vocab_size: int = 0) -> ByteLevel:
    encoding = tiktoken.Encoding(name, pat_str=PATTERN, mergeable_ranks=pairs.ids, special_tokens=pairs.specials)
    return ByteLevel(encoding, (end, *ENDS) if end else ENDS, vocab_size)


def _as_tokenizer_json(ids: dict[str, int], pairs: list[list[str]], specials: dict[str, int]) -> str:
    """GPT-2's pre-tokenization around these merges, in Hugging Face's format."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [{"id": i, "content": name, **flags} for name, i in specials.items()],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": {**ids, **specials}, "merges": pairs},
        }
    )


def _from_file(path: Path) -> Vocabulary:
    if path.suffix != ".json":
        try:
            return SentencePiece(str(path), path.read_bytes())
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}; check its path and permissions") from None
    content = read_text(path)
    try:
        saved = json.loads(content)
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); give a tokenizer.json") from None
    if isinstance(saved, dict) and "ranks" in saved:
        return from_tokenizer(Tokenizer.load(path, remedy="train it again with dtgpt tokenizer train"))
    if not isinstance(saved, dict) or not isinstance(saved.get("model"), dict):
        raise UserError(f"{path} is no tokenizer; give a tokenizer.json, or what dtgpt tokenizer train wrote")
    end = _end_named_beside(path)
    pairs = _plain_byte_pairs(saved)
    return (
        _byte_level(str(path), pairs, end, max(saved["model"]["vocab"].values()) + 1)
        if pairs
        else HuggingFace(str(path), content, end)
    )


def from_tokenizer(tokenizer: Tokenizer) -> ByteLevel:
    """The vocabulary of a run, or of `dtgpt tokenizer train`."""
    ids = {token: i for i, token in enumerate(tokenizer.ranks)}
    specials = {END_OF_TEXT: tokenizer.end_of_text}
    return ByteLevel(tiktoken.Encoding(tokenizer.name, pat_str=tokenizer.pattern, mergeable_ranks=ids,
                                       special_tokens=specials))  # fmt: skip


def _plain_byte_pairs(saved: dict) -> BytePairs | None:
    """The tokens of a tokenizer.json where it encodes as GPT-2's does; else None."""
    model, before = saved["model"], saved.get("pre_tokenizer") or {}
    plain = (
        model.get("type") == "BPE"
        and not any(model.get(name) for name in ("dropout", "byte_fallback", "continuing_subword_prefix",
                                                 "end_of_word_suffix", "unk_token"))
        and saved.get("normalizer") is None
        and before.get("type") == "ByteLevel"
        and before.get("use_regex", True)
        and not before.get("add_prefix_space", True)
    )  # fmt: skip
    added = saved.get("added_tokens") or []
    loose = any(not t.get("special") or t.get("lstrip") or t.get("rstrip") or t.get("single_word") for t in added)
    if not plain or loose:
        return None
    pairs = [merge.split(" ") if isinstance(merge, str) else list(merge) for merge in model["merges"]]
    return from_merges(model["vocab"], pairs, {token["content"]: token["id"] for token in added})


def _parse_tokenizer(name: str, content: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            f"{name} needs the package tokenizers, which is missing; run pip install 'dtgpt[data]'"
        ) from None
    try:
        return tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the package raises plain Exception
        raise UserError(f"{name} is no tokenizer.json that tokenizers can read ({error})") from None


def _end_named_beside(path: Path) -> str | None:
    """`eos_token` of tokenizer_config.json in the same folder, if it is there."""
    try:
        token = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return token.get("content") if isinstance(token, dict) else token

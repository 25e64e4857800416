"""Tokenizers that other packages encode: Hugging Face's tokenizer.json and SentencePiece models."""

import base64
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np

from dtgpt.data.library_tokenizers.base import ENDS, LibraryTokenizer, Span, overlapping, panics_as_user_errors
from dtgpt.data.library_tokenizers.byte_level import letter_bytes
from dtgpt.data.tokenizers.tokenizer import MOST
from dtgpt.util.errors import UserError, shown
from dtgpt.util.rules import Is, Other, Rule, Rules, check_rules
from dtgpt.util.shared.optional import optional_package
from dtgpt.util.storage import parse_json

BEGINS = ("<s>", "<|begin_of_text|>", "<bos>")
BLANK = "\u2581"  # which stands for a blank in SentencePiece's tokens, and in Hugging Face's copies of these
ENCODING = Lock()  # versions of tokenizers raise where a thread sets the object's state while another one encodes
BYTE = re.compile("<0x[0-9A-F]{2}>")


ID_RULES: Rules = (
    Rule(
        f"{{name}} has the id {{largest}}, which is not in 0 to {MOST - 1}; fetch it again",
        Is("largest", ">=", MOST),
    ),
)
AROUND_RULES: Rules = (
    Rule(
        "{name} puts the id {around} around texts, but its tokens end at {last}; fetch it again",
        Is("around", ">", Other("last")),
    ),
)


class TokenizerJson(LibraryTokenizer):
    """Any tokenizer.json, with what its post-processor adds: a begin of text, for example. `end`: the name of its end
    of text, if a file in its folder has one."""

    def __init__(self, name: str, content: str, end: str | None = None):
        self.name, self._content = name, content
        self.ranks = [content.encode()]
        ids = self._parsed.get_vocab(with_added_tokens=True)
        check_rules(ID_RULES, {"name": name, "largest": max(ids.values(), default=0)})
        self.vocab_size, self.num_tokens = max(ids.values(), default=-1) + 1, len(ids)
        special = {t.content: i for i, t in self._parsed.get_added_tokens_decoder().items() if t.special}
        named = special or ids  # a name may be a piece of text too: "<s>" is one of Qwen's
        ends = [token for token in (end, *ENDS) if token in named] + [token for token in (end, *ENDS) if token in ids]
        self.end_name = next(iter(ends), None)
        self.end_of_text = ids.get(self.end_name)
        self.begin_of_text = next((ids[token] for token in BEGINS if token in named), None)
        around = max(self.encode(""), default=0)  # the post-processor's ids are checked by nobody else
        check_rules(AROUND_RULES, {"name": name, "around": around, "last": max(self.vocab_size - 1, 0)})

    @cached_property
    def special_names(self) -> Collection[str]:  # type: ignore[override]
        return [token.content for token in self._parsed.get_added_tokens_decoder().values() if token.special]

    @property
    def added_names(self) -> Collection[str]:
        """Return the names of special tokens, and of others that are one token wherever a text has them."""
        return [token.content for token in self._parsed.get_added_tokens_decoder().values()]

    @cached_property
    def _parsed(self) -> Any:
        return parse_tokenizer(self.name, self._content)

    @contextmanager
    def _encoding(self, what: str) -> Iterator[None]:
        """Keep the library for one thread, and raise its errors as a UserError about `what`."""
        with panics_as_user_errors(self.name), ENCODING:
            try:
                yield
            except Exception as error:  # the package raises plain Exception
                raise UserError(
                    f"the tokenizer {self.name} cannot encode {what} ({error}); use other characters, or another "
                    "tokenizer"
                ) from None

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by the name that the file has; None where there is none."""
        return self._parsed.token_to_id(token)

    def encode(self, text: str, special: bool = False) -> list[int]:
        with self._encoding(shown(text)):
            self._parsed.encode_special_tokens = not special
            return self._parsed.encode(text).ids

    def encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[list[int], np.ndarray]:
        with self._encoding("a chat"):
            self._parsed.encode_special_tokens = False
            found = self._parsed.encode(text, add_special_tokens=False)
        return found.ids, overlapping(np.array(found.offsets, np.int64).reshape(-1, 2), spans)

    def _decode(self, ids: list[int]) -> str:
        return self._parsed.decode(ids, skip_special_tokens=False)

    def bytes_of(self, i: int) -> bytes | None:
        spelled = self._spelled
        return None if not spelled else spelled[i] if i < len(spelled) else b""

    @cached_property
    def _spelled(self) -> list[bytes]:
        """The bytes of each token, where the decoder takes letters for bytes, and all other names as they are."""
        if (self._decoder or {}).get("type") != "ByteLevel":
            return []
        letters, spelled = letter_bytes(), [b""] * self.vocab_size
        for token, i in self._parsed.get_vocab(with_added_tokens=True).items():
            plain = letters.keys() >= set(token)
            spelled[i] = bytes(map(letters.__getitem__, token)) if plain else token.encode()
        return spelled

    @property
    def _decoder(self) -> Any:
        return parse_json(self._content).get("decoder")

    def byte_of(self, i: int) -> int | None:
        return self._bytes.get(i)

    @cached_property
    def _bytes(self) -> dict[int, int]:
        if "'ByteFallback'" not in str(self._decoder):
            return {}
        return {i: byte for byte in range(256) if (i := self._parsed.token_to_id(f"<0x{byte:02X}>")) is not None}

    def token_bytes(self) -> np.ndarray:
        sizes = np.zeros(self.vocab_size, np.int64)
        letters = letter_bytes() if "'ByteLevel'" in str(self._decoder) else {}
        for token, i in self._parsed.get_vocab(with_added_tokens=False).items():
            sizes[i] = len(token) if letters and letters.keys() >= set(token) else spelled(token)
        for i, token in self._parsed.get_added_tokens_decoder().items():
            sizes[i] = 0 if token.special else spelled(token.content)
        return sizes

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "end": self.end_name, "tokenizer_json": self._content}


class SentencePiece(LibraryTokenizer):
    """A SentencePiece .model. `begin`: each text opens with the model's begin of text, as Megatron-LM's Llama2Tokenizer
    does."""

    names_special = False

    def __init__(self, name: str, model: bytes, begin: bool = False):
        self.name, self._begin = name, begin
        self.ranks = [model]
        processor = self._processor
        self.vocab_size = self.num_tokens = processor.get_piece_size()
        end, first = processor.eos_id(), processor.bos_id()
        self.end_of_text, self.begin_of_text = end if end >= 0 else None, first if first >= 0 else None

    @cached_property
    def _processor(self) -> Any:
        return self._open(self.ranks[0])

    @cached_property
    def _inner(self) -> Any:
        """A processor that neither adds nor drops blanks at the edges, for what follows a special token."""
        messages = "sentencepiece.sentencepiece_model_pb2"
        model = optional_package("protobuf", f"special tokens in a prompt for {self.name}", messages).ModelProto()
        model.ParseFromString(self.ranks[0])
        model.normalizer_spec.add_dummy_prefix = model.normalizer_spec.remove_extra_whitespaces = False
        return self._open(model.SerializeToString())

    def _open(self, model: bytes) -> Any:
        processor = optional_package("sentencepiece", self.name).SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(model)
        except RuntimeError:
            raise UserError(f"{self.name} is not a SentencePiece model; give the .model file of one") from None
        return processor

    @property
    def special_names(self) -> Collection[str]:
        return [self.piece(i) for i in range(self.vocab_size) if self._processor.is_control(i)]

    def encode(self, text: str, special: bool = False) -> list[int]:
        if special:
            raise UserError(f"{self.name} is a SentencePiece model, without special tokens; leave --encode-special out")
        return self._processor.encode(text, out_type=int, add_bos=self._begin)

    def _encode_named(self, text: str) -> list[int]:
        """Cut the text at the names, as transformers does: SentencePiece itself does not know them."""
        before, *rest = self._names.split(text)
        ids = self.encode(before)
        for name, piece in zip(rest[::2], rest[1::2], strict=True):
            ids += [self._processor.piece_to_id(name), *(self._inner.encode(piece, out_type=int) if piece else [])]
        return ids

    @cached_property
    def _names(self) -> re.Pattern[str]:
        """What finds the names of tokens that no text is cut into; `(?!)` finds nothing."""
        known = self._processor
        named = [self.piece(i) for i in range(self.vocab_size) if known.is_control(i) or known.is_unknown(i)]
        return re.compile(f"({'|'.join(map(re.escape, sorted(named, key=len, reverse=True))) or '(?!)'})")

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)

    def byte_of(self, i: int) -> int | None:
        return int(self.piece(i)[3:5], 16) if self._processor.is_byte(i) else None

    def piece(self, i: int) -> str:
        """Return the name of a token."""
        return self._processor.id_to_piece(i)

    def token_bytes(self) -> np.ndarray:
        known = self._processor
        silent = [known.is_control(i) or known.is_unknown(i) for i in range(self.vocab_size)]
        return np.array([0 if none else spelled(self.piece(i)) for i, none in enumerate(silent)], np.int64)

    def to_json(self) -> dict[str, Any]:
        model = base64.b64encode(self.ranks[0]).decode()
        return {"name": self.name, "begin": self._begin, "sentencepiece": model}


def from_json(saved: dict[str, Any]) -> TokenizerJson | SentencePiece:
    """Return the tokenizer of which `to_json` wrote `saved`."""
    if "sentencepiece" in saved:
        return SentencePiece(saved["name"], base64.b64decode(saved["sentencepiece"], validate=True), saved["begin"])
    return TokenizerJson(saved["name"], saved["tokenizer_json"], saved["end"])


def spelled(token: str) -> int:
    """Return the bytes of text that a token stands for by its name."""
    return 1 if BYTE.fullmatch(token) else len(token.replace(BLANK, " ").encode())


def parse_tokenizer(name: str, content: str) -> Any:
    """Parse a tokenizer.json by Hugging Face's library. Raise UserError where that cannot read it or is missing."""
    tokenizers = optional_package("tokenizers", name)
    try:
        with panics_as_user_errors(name):
            parsed = tokenizers.Tokenizer.from_str(content)
    except UserError:
        raise
    except Exception as error:  # the package raises plain Exception
        raise UserError(f"{name} is not a tokenizer.json that tokenizers can read ({error})") from None
    parsed.no_truncation()  # a training text is taken whole
    parsed.no_padding()
    return parsed

"""A tokenizer as the files with which Hugging Face's transformers gives the same ids and the same text."""

import json
import re
from typing import Any

from dtgpt.data.library_tokenizers.added_tokens import opening_template
from dtgpt.data.library_tokenizers.bpe_files import BYTE_LEVEL, tokenizer_json
from dtgpt.data.library_tokenizers.byte_level import PATTERN, PATTERNS, ByteLevel, letter_bytes
from dtgpt.data.library_tokenizers.characters import Char, characters_json
from dtgpt.data.library_tokenizers.chat_template import template_of
from dtgpt.data.library_tokenizers.libraries import SentencePiece, TokenizerJson, parse_tokenizer
from dtgpt.data.library_tokenizers.rank_files import QWEN
from dtgpt.data.library_tokenizers.sentencepiece_export import normalizes, sentencepiece_json
from dtgpt.data.tokenizers.tokenizer import Bytes, Tokenizer
from dtgpt.util.errors import UserError, shown
from dtgpt.util.storage import parse_json

CLASS = "PreTrainedTokenizerFast"  # of transformers, for every tokenizer.json
PROBES = (
    "",
    " ",
    "Hello, world!",
    "don't we'll I'VE it'S",
    "  two  blanks   \t\n\n  lines\r\n \n",
    "the end ",
    "x = [1234567, 3.14159]\n",
    "aaaaaaaaaaaaa 00000000 --------- .......",
    "CamelCase HTTPServer",
    "Grüße aus Köln, naïve café",
    "日本語のテキスト。한국어 텍스트",
    "Привет, мир! שלום العربية हिन्दी ไทย",
    "🎈👩\u200d👧 ½ ① ﬁ Å ſ K",
    "e\u0301 \u1100\u1161 ▁ \U0010ffff",
    "\u00a0\u3000\u2028\x00\x1c\x85\ufeff\ufffd\u200b",
)
PROBED = 20_000  # tokens whose text is encoded both ways


def transformers_files(tokenizer: Tokenizer, seq_length: int) -> dict[str, Any]:
    """Return the content of tokenizer.json and tokenizer_config.json for a model of `seq_length` positions.

    Raises UserError where transformers cannot do what the tokenizer does; then its ids would be other ones.
    """
    content = tokenizer_json_of(tokenizer)
    library = parse_tokenizer(tokenizer.name, content)
    library.encode_special_tokens = True  # as in `Tokenizer.encode`
    if (reason := _difference(tokenizer, library)) is not None:
        raise UserError(f"the tokenizer {tokenizer.name} cannot be expressed in a tokenizer.json: {reason}")
    opening = None if isinstance(tokenizer, Char) else begin_token(tokenizer)  # a character is not a special token
    names = {"bos_token": opening, "eos_token": tokenizer.end_of_text}
    config = {
        "tokenizer_class": CLASS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": seq_length,
        **{name: library.id_to_token(i) for name, i in names.items() if i is not None},
    }
    if (template := template_of(tokenizer)) is not None:
        config = {**template.tokens, **config, "chat_template": template.source}
    return {"tokenizer.json": parse_json(content), "tokenizer_config.json": config}


def export_note(tokenizer: Tokenizer) -> str | None:
    """Return what a reader of these files should know."""
    if isinstance(tokenizer, SentencePiece) and normalizes(tokenizer):
        return (
            f"{tokenizer.name} normalizes texts by a table, which transformers applies to whole characters with their "
            "marks: texts with several marks on one character, or emoji joined to others, may get other ids there"
        )
    return None


def class_note(content: dict[str, Any], model_type: str) -> str | None:
    """Return what a reader of tokenizer.json beside a model of this type should know: for a Qwen2 transformers 5 takes
    Qwen2's cuts, whatever is in the file."""
    if model_type != "qwen2" or _is_cut_as_qwen2(content):
        return None
    return (
        "AutoTokenizer of transformers 5 cuts texts of a model_type=qwen2 as Qwen2 does, and not as this "
        "tokenizer.json; open it there with PreTrainedTokenizerFast.from_pretrained"
    )


def _is_cut_as_qwen2(content: dict[str, Any]) -> bool:
    if content["model"]["type"] != "BPE":
        return False
    found = []
    for cuts in ({}, {"normalizer": {"type": "NFC"}, "pre_tokenizer": _cut_by(QWEN.pattern)}):
        library = parse_tokenizer("tokenizer.json", json.dumps(content | cuts))
        library.encode_special_tokens = True
        found.append([encoding.ids for encoding in library.encode_batch(PROBES)])
    return found[0] == found[1]


def first_token(tokenizer: Tokenizer) -> int | None:
    """Return the id with which a text begins where nothing else is given, as in `dtgpt generate`."""
    return next(iter(tokenizer.encode("")), tokenizer.opening if tokenizer.spells else None)


def begin_token(tokenizer: Tokenizer) -> int | None:
    """Return the begin of text that the tokenizer has; of one like GPT-2's, which has none, the end of text, as GPT-2's
    own files do."""
    if tokenizer.begin_of_text is not None:
        return tokenizer.begin_of_text
    like_gpt2 = isinstance(tokenizer, ByteLevel) and tokenizer.pattern in PATTERNS
    first = next(iter(tokenizer.encode("")), None)
    return first_token(tokenizer) if like_gpt2 or isinstance(tokenizer, Bytes | Char) else first


def tokenizer_json_of(tokenizer: Tokenizer) -> str:
    """Return a tokenizer.json with the ids of the tokenizer. Raise UserError where there is none."""
    if isinstance(tokenizer, Bytes):  # a BPE without merges
        return _byte_level_json(ByteLevel(tokenizer.name, PATTERN, tokenizer.ranks))
    if isinstance(tokenizer, ByteLevel):
        return _byte_level_json(tokenizer)
    if isinstance(tokenizer, TokenizerJson):
        whole = {"truncation": None, "padding": None}  # a text is taken as it is
        return json.dumps(parse_json(tokenizer.to_json()["tokenizer_json"]) | whole, ensure_ascii=False)
    if isinstance(tokenizer, SentencePiece):
        return sentencepiece_json(tokenizer)
    if isinstance(tokenizer, Char):
        return characters_json(tokenizer)
    raise UserError("the model was trained on token ids alone (data.tokenizer=ids), so that there is not a tokenizer")


def _byte_level_json(tokenizer: ByteLevel) -> str:
    tokens = {token: i for i, token in enumerate(tokenizer.ranks) if token}
    letters = {byte: ord(letter) for letter, byte in letter_bytes().items()}
    merges, whole_words = tokenizer.merges

    def spelled(token: bytes) -> str:
        return token.decode("latin-1").translate(letters)

    before = None if tokenizer.pattern in PATTERNS else _cut_by(tokenizer.pattern)
    return tokenizer_json(
        {spelled(token): i for token, i in tokens.items()},
        [f"{spelled(left)} {spelled(right)}" for left, right in merges],
        tokenizer.specials,
        before,
        whole_words,
        normalizer={"type": "NFC"} if tokenizer.composed else None,
        post_processor=opening_template(str(tokenizer.begin_name), tokenizer.first[0]) if tokenizer.first else None,
    )


def _cut_by(pattern: str) -> dict[str, Any]:
    """Return the pre-tokenizer of bytes in Hugging Face's format that cuts texts by a pattern."""
    regex = {"Regex": _for_oniguruma(pattern)}
    split = {"type": "Split", "pattern": regex, "behavior": "Removed", "invert": True}  # keeps what matches
    return {"type": "Sequence", "pretokenizers": [split, {**BYTE_LEVEL, "use_regex": False}]}


def _for_oniguruma(pattern: str) -> str:
    """Return `pattern` in the syntax of tokenizers' library for regular expressions, in which `$` is the end of any
    line, and `+` after a number of repetitions is not possessive but one more repetition."""
    pattern = re.sub(r"(?<!\\)(\{\d*,?\d*\})\+", r"\1", pattern)
    return re.sub(r"(?<!\\)\$", r"\\z", pattern)


def _difference(tokenizer: Tokenizer, library: Any) -> str | None:
    """Return where the library gives a probe other ids than the tokenizer, or the ids another text; None: nowhere."""
    step = max(1, tokenizer.vocab_size // PROBED)
    tokens = [tokenizer.decode([i]) for i in range(0, tokenizer.vocab_size, step)]
    probes = [*PROBES, " ".join(tokens[:2000]), *tokens]
    if isinstance(tokenizer, Char):
        known = [token for token in tokens if token in tokenizer.ids]
        probes = ["", "".join(known), *known]
    try:
        expected = [ids.tolist() for ids in tokenizer.encode_batch(probes)]
        found = [encoding.ids for encoding in library.encode_batch(probes)]
    except Exception as error:  # the package raises plain Exception
        return f"transformers would fail ({error})"
    for probe, ours, theirs in zip(probes, expected, found, strict=True):
        if ours != theirs:
            return f"transformers would give other ids to {shown(probe)}"
    opening = len(tokenizer.encode("")) if isinstance(tokenizer, SentencePiece) else 0  # it decodes to no text there
    for probe, ids in zip(probes[: len(PROBES)], expected, strict=False):
        if tokenizer.decode(ids) != library.decode(ids[opening:], skip_special_tokens=False):
            return f"transformers would decode the ids of {shown(probe)} to another text"
    return None

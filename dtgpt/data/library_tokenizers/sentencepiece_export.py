"""A SentencePiece model in Hugging Face's format tokenizer.json."""

import base64
import json
import math
import re
from itertools import pairwise
from typing import Any

from dtgpt.data.library_tokenizers.added_tokens import opening_template, special_token
from dtgpt.data.library_tokenizers.libraries import BLANK, SentencePiece
from dtgpt.data.library_tokenizers.merges import merges_of
from dtgpt.util.rules import Given, Is, Missing, Rule, Rules, check_rules
from dtgpt.util.shared.optional import optional_package

UNIGRAM, BPE, WORD, CHAR = 1, 2, 3, 4  # kinds of models in sentencepiece_model.proto
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # and of their pieces
SILENT = 1000.0  # by which pieces that stand in no text score less than the least of others


MODEL_RULES: Rules = (
    Rule(
        "the tokenizer {tokenizer.name} is one of whole words, which a tokenizer.json cannot be; keep it as it is",
        Is("model_type", "==", WORD),
    ),
    Rule(
        "the tokenizer {tokenizer.name} treats blanks in a way that a tokenizer.json cannot express; keep it as it is",
        Given("treat_whitespace_as_suffix"),
    ),
    Rule(
        "the tokenizer {tokenizer.name} treats blanks in a way that a tokenizer.json cannot express; keep it as it is",
        Missing("normalizer.escape_whitespaces"),
    ),
)


def sentencepiece_json(tokenizer: SentencePiece) -> str:
    """Return a SentencePiece model in Hugging Face's format. Raise UserError where the model is of a kind that the
    format does not have, or where a package is missing."""
    model = _parse(tokenizer)
    trainer = model.trainer_spec
    check_rules(MODEL_RULES, trainer, tokenizer=tokenizer, normalizer=model.normalizer_spec)
    merges, words = _merges(model)
    kinds = (UNKNOWN, CONTROL) if words else (UNKNOWN, CONTROL, USER_DEFINED)
    added = [
        special_token(piece.piece, i, special=piece.type != USER_DEFINED)
        for i, piece in enumerate(model.pieces)
        if piece.type in kinds
    ]
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": _normalizer(model.normalizer_spec),
            "pre_tokenizer": _isolated(words),
            "post_processor": _begin(tokenizer),
            "decoder": _decoder(model),
            "model": _unigram(model) if trainer.model_type == UNIGRAM else _bpe(model, merges, bool(words)),
        },
        ensure_ascii=False,
    )


def normalizes(tokenizer: SentencePiece) -> bool:
    """Return whether a table changes texts before they are encoded."""
    return bool(_parse(tokenizer).normalizer_spec.precompiled_charsmap)


def _parse(tokenizer: SentencePiece) -> Any:
    messages = "sentencepiece.sentencepiece_model_pb2"
    model = optional_package("protobuf", f"a tokenizer.json of {tokenizer.name}", messages).ModelProto()
    model.ParseFromString(tokenizer.ranks[0])
    return model


def _normalizer(spec: Any) -> dict | None:
    steps: list[dict] = []
    if spec.precompiled_charsmap:
        # The library looks up a character with its marks, of which it finds no more than the beginning. Composing first
        # leaves less to find.
        steps += [{"type": "NFC"}, _replace({"String": "\r\n"}, "\n\n")]
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spec.remove_extra_whitespaces:
        steps += [_replace({"Regex": r"\A +| +\z"}, ""), _replace({"Regex": " {2,}"}, " ")]
    if spec.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": BLANK})
    return {"type": "Sequence", "normalizers": [*steps, _replace({"String": " "}, BLANK)]}


def _decoder(model: Any) -> dict:
    unknown = _replace({"String": model.trainer_spec.unk_piece}, model.trainer_spec.unk_surface)
    steps = [unknown, _replace({"String": BLANK}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if model.normalizer_spec.add_dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _replace(pattern: dict[str, str], content: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _begin(tokenizer: SentencePiece) -> dict | None:
    """Return the post-processor that opens each text with a token, where there is one."""
    opening = tokenizer.encode("")
    return opening_template(tokenizer.piece(opening[0]), opening[0]) if opening else None


def _merges(model: Any) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the merges of a BPE, and the pieces of the user that are cut out of a text before these apply. The format
    takes such a word as one token if any whole word may be one, which changes nothing where merges make all others."""
    kind = model.trainer_spec.model_type
    if kind == UNIGRAM:
        return [], []
    words = [p.piece for p in model.pieces if p.type == USER_DEFINED]
    if kind == CHAR:
        return [], words
    ranks = {p.piece: -p.score for p in model.pieces if p.type in (NORMAL, UNUSED)}
    if all(_is_made(piece, ranks) for piece in ranks if words):
        return merges_of(ranks)[0], words
    return merges_of(ranks | dict.fromkeys(words, 0.0))[0], []


def _is_made(piece: str, ranks: dict[str, float]) -> bool:
    """Return whether merging, the pair whose union ranks first at a time, makes `piece` of its characters."""
    parts = list(piece)
    while len(parts) > 1:
        unions = [ranks.get(a + b, math.inf) for a, b in pairwise(parts)]
        i = unions.index(min(unions))
        if unions[i] == math.inf:
            return False
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return True


def _isolated(words: list[str]) -> dict | None:
    """Return the pre-tokenizer that cuts `words` out of a text, the longest that fits first."""
    if not words:
        return None
    pattern = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _bpe(model: Any, merges: list[tuple[str, str]], ignore_merges: bool) -> dict:
    return {
        "type": "BPE",
        "unk_token": model.trainer_spec.unk_piece,
        "fuse_unk": True,
        "byte_fallback": model.trainer_spec.byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": {piece.piece: i for i, piece in enumerate(model.pieces)},
        "merges": [list(pair) for pair in merges],
    }


def _unigram(model: Any) -> dict:
    least = min((p.score for p in model.pieces if p.type == NORMAL), default=0.0) - SILENT
    return {
        "type": "Unigram",
        "unk_id": model.trainer_spec.unk_id,
        "byte_fallback": model.trainer_spec.byte_fallback,
        "vocab": [[p.piece, p.score if p.type in (NORMAL, USER_DEFINED) else least] for p in model.pieces],
    }

"""Tokenizers of other libraries in their files: GPT-2's BPE in two of them, Hugging Face's tokenizer.json,
SentencePiece models and files of tiktoken's ranks. Ids are those of the files, whoever encodes."""

from pathlib import Path
from typing import Any

from dtgpt.data.library_tokenizers.added_tokens import added_tokens, check_added, check_has_added, special_token
from dtgpt.data.library_tokenizers.base import ENDS
from dtgpt.data.library_tokenizers.bpe_files import BytePairs, check_merges, from_merges, tokenizer_json
from dtgpt.data.library_tokenizers.byte_level import PATTERN, ByteLevel, by_id, is_id
from dtgpt.data.library_tokenizers.characters import read_characters
from dtgpt.data.library_tokenizers.folder import (
    NAMES,
    check_pre_tokenization,
    end_of_text_beside,
    opens_texts,
    tokenizer_file,
)
from dtgpt.data.library_tokenizers.libraries import SentencePiece, TokenizerJson
from dtgpt.data.library_tokenizers.meta_pickle import read_meta
from dtgpt.data.library_tokenizers.rank_files import from_ranks, is_rank_file
from dtgpt.data.tokenizers.tokenizer import END_OF_TEXT, MOST, Tokenizer
from dtgpt.util.errors import UserError, shown
from dtgpt.util.shared.vocabulary_files import read_content
from dtgpt.util.storage import parse_json


def open_path(path: Path, begin: bool) -> Tokenizer:
    """Return the tokenizer of a file, or of a folder with one. Raise UserError where it cannot be read."""
    if not path.is_dir():
        return _from_file(path, begin)
    found = tokenizer_file(path)
    if found is None:
        raise UserError(f"{path} has no tokenizer (none of {', '.join(NAMES)}); give a folder or file with one")
    if found.name == "vocab.json":
        check_pre_tokenization(path)
        return from_files(found, found.with_name("merges.txt"))
    return _from_file(found, begin or opens_texts(path))


def _from_file(path: Path, begin: bool) -> Tokenizer:
    if path.name == "meta.pkl":
        return read_meta(path)
    if path.suffix != ".json":
        binary = read_content(path)
        if is_rank_file(binary):
            return from_ranks(path, binary, begin, end_of_text_beside(path))
        pieces = SentencePiece(str(path), binary, begin)
        check_has_added(path, lambda token: token["id"] < pieces.vocab_size)
        return pieces
    content = read_text(path)
    try:
        saved = parse_json(content)
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); give a tokenizer.json") from None
    if not isinstance(saved, dict) or not isinstance(saved.get("model"), dict):
        raise UserError(f"{path} is not a tokenizer; give a tokenizer.json, or what dtgpt tokenizer train wrote")
    _check_tokenizer_json(saved, path)
    names = [token["content"] for token in saved.get("added_tokens") or []]
    check_has_added(path, lambda token: token["content"] in names)
    if characters := read_characters(saved):
        return characters
    end = end_of_text_beside(path)
    pairs = _plain_byte_pairs(saved)
    if pairs is None:
        return TokenizerJson(str(path), content, end)
    return _byte_level(str(path), pairs, saved["model"]["vocab"], end)


def read_text(path: Path) -> str:
    """Return the text of a file. Raise UserError where it cannot be read, is too large or is not UTF-8."""
    content = read_content(path)
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); fetch it again") from None


def _check_ids(ids: Any, source: Path) -> None:
    """Raise UserError where `ids` is not an object of token: id."""
    if not isinstance(ids, dict):
        raise UserError(f"{source} is not a vocabulary, which is one object of token: id; fetch it again")
    wrong = next((token for token, i in ids.items() if not is_id(i)), None)
    if wrong is not None:
        raise UserError(
            f"{source} gives {shown(wrong)} the id {shown(ids[wrong])}, which is not in 0 to {MOST - 1}; fetch it again"
        )


def from_files(vocab: Path, merges: Path) -> Tokenizer:
    """Open GPT-2's BPE (or another byte-level one with its pre-tokenization) from vocab.json and merges.txt, with the
    tokens that files in their folder add. Its end of text is the one that a tokenizer_config.json there names, else
    `<|endoftext|>`."""
    try:
        ids = parse_json(read_text(vocab))
    except ValueError as error:
        raise UserError(f"{vocab} is not a vocabulary ({error}); give the vocab.json of a byte-level BPE") from None
    _check_ids(ids, vocab)
    pairs = [line.split(" ") for line in read_text(merges).split("\n") if line and not line.startswith("#version")]
    if not all(len(pair) == 2 for pair in pairs):
        wrong = next(" ".join(pair) for pair in pairs if len(pair) != 2)
        raise UserError(
            f"{merges} holds {shown(wrong)}, which is not a pair of tokens; give the merges.txt of a byte-level BPE"
        )
    added = added_tokens(vocab)
    check_added(added, ids, vocab)
    known = ids | {token["content"]: token["id"] for token in added}
    named = end_of_text_beside(vocab)
    end = named if named is not None and named in known else END_OF_TEXT
    if end not in {token["content"] for token in added}:
        added.append(special_token(end, known.get(end, max(known.values(), default=-1) + 1)))
    specials = {token["content"]: token["id"] for token in added}
    check_merges(ids, pairs, specials, vocab, merges)
    byte_pairs = None if any(map(is_loose, added)) else from_merges(ids, pairs, specials)
    if byte_pairs is None:
        content = tokenizer_json(ids, list(map(" ".join, pairs)), specials, added_tokens=added)
        return TokenizerJson(str(vocab), content, end)
    return _byte_level(vocab.name, byte_pairs, ids, end)


def is_loose(token: dict[str, Any]) -> bool:
    """Return whether an added token is more than a special one, whose name alone stands for it."""
    return not token.get("special") or any(token.get(name) for name in ("lstrip", "rstrip", "single_word"))


def _byte_level(name: str, pairs: BytePairs, ids: dict[str, int], end: str | None = None) -> ByteLevel:
    """Make a byte-level tokenizer. `ids`: of all that the file names, also tokens that no text is cut into."""
    ends = (end, *ENDS) if end else ENDS
    largest, count = max(ids.values(), default=-1), len(ids.keys() | pairs.specials.keys())
    made = ByteLevel(name, PATTERN, by_id(pairs.ids), pairs.specials, ends, largest + 1, count)
    made.merges = pairs.merges, False
    return made


def _check_tokenizer_json(saved: dict, path: Path) -> None:
    """Raise UserError for ids that are none, and for tokens or merges of a BPE that are missing."""
    added = saved.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(t, dict) and isinstance(t.get("content"), str) for t in added):
        raise UserError(f"{path} is not a tokenizer.json: its added_tokens are not tokens; fetch it again")
    specials = {token["content"]: token.get("id") for token in added}
    _check_ids(specials, path)
    model = saved["model"]
    if model.get("dropout"):
        raise UserError(
            f"{path} leaves out merges at random (dropout={shown(model['dropout'])}), so that a text has new ids each "
            'time; write "dropout": null there'
        )
    if isinstance(model.get("vocab"), dict):
        _check_ids(model["vocab"], path)
        if isinstance(model.get("merges"), list):
            check_merges(model["vocab"], [_pair(merge) for merge in model["merges"]], specials, path, path, model)


def _pair(merge: Any) -> list[str]:
    """Return the two tokens of a merge, which older files have in one text; any other value is left to the library."""
    return merge.split(" ") if isinstance(merge, str) else merge


def _plain_byte_pairs(saved: dict) -> BytePairs | None:
    """Return the tokens of a tokenizer.json where it encodes as GPT-2's does; else None, also where it is damaged:
    then Hugging Face's library reports how."""
    try:
        model, before = saved["model"], saved.get("pre_tokenizer") or {}
        plain = (
            model.get("type") == "BPE"
            and not any(
                model.get(name)
                for name in (
                    "dropout",
                    "byte_fallback",
                    "continuing_subword_prefix",
                    "end_of_word_suffix",
                    "unk_token",
                    "ignore_merges",
                )
            )
            and saved.get("normalizer") is None
            and _adds_nothing(saved.get("post_processor"))
            and before.get("type") == "ByteLevel"
            and before.get("use_regex", True)
            and not before.get("add_prefix_space", True)
        )
        added = saved.get("added_tokens") or []
        if not plain or any(map(is_loose, added)) or not _numbered_by_the_library(model["vocab"], added):
            return None
        pairs = [_pair(merge) for merge in model["merges"]]
        return from_merges(model["vocab"], pairs, {token["content"]: token["id"] for token in added})
    except (KeyError, TypeError, AttributeError):
        return None


def _numbered_by_the_library(vocab: dict[str, int], added: list[dict]) -> bool:
    """Return whether added tokens have the ids that Hugging Face's library gives them, which ignores those in the
    file: an id in the vocabulary, else the next one after it."""
    following = len(vocab)
    for token in added:
        if token["id"] != vocab.get(token["content"], following):
            return False
        following = max(following, token["id"] + 1)
    return True


def _adds_nothing(after: dict | None) -> bool:
    """Return whether a post-processor leaves the ids as they are."""
    if after is None or after.get("type") == "ByteLevel":
        return True
    if after.get("type") == "Sequence":
        return all(map(_adds_nothing, after["processors"]))
    pieces = [item.get("Sequence", {}).get("id") for item in after["single"]]
    return after.get("type") == "TemplateProcessing" and pieces == ["A"]  # the text, once

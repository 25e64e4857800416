"""A tokenizer by what the user names: GPT-2's BPE from its two files, Hugging Face's tokenizer.json, SentencePiece
models, files of tiktoken's ranks, tiktoken's encodings, vocabularies that `dtgpt tokenizer train` made or a run holds,
and plain bytes.

Ids are those of the files, whoever encodes.
"""

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tiktoken

from dtgpt.data.tokenizers.added_tokens import added_tokens, check_added, check_has_added
from dtgpt.data.tokenizers.bpe_files import (
    LARGEST,
    BytePairs,
    check_merges,
    from_merges,
    read_content,
    read_text,
    tokenizer_json,
)
from dtgpt.data.tokenizers.byte_level import PATTERN, ByteLevel, by_id, train_ranks
from dtgpt.data.tokenizers.char import Char, Ids, read_meta
from dtgpt.data.tokenizers.folder import (
    NAMES,
    check_pre_tokenization,
    end_of_text_beside,
    opens_texts,
    template_beside,
    tokenizer_file,
)
from dtgpt.data.tokenizers.libraries import SentencePiece, TokenizerJson
from dtgpt.data.tokenizers.rank_files import from_ranks, is_rank_file
from dtgpt.data.tokenizers.tokenizer import (
    CHAT_TEMPLATE,
    CHECKSUM,
    END_OF_TEXT,
    ENDS,
    MOST,
    Tokenizer,
    checksum,
    panics_as_user_errors,
    special_token,
)
from dtgpt.posttrain.chats.template import ChatTemplate
from dtgpt.util.errors import UserError, shown
from dtgpt.util.storage import parse_json, read_json

SAVED = ("ranks", "tokenizer_json", "sentencepiece", "characters", "ids")  # one is in what Tokenizer.save writes
FILES = "a tokenizer.json, a SentencePiece or tiktoken file, or vocab.json and merges.txt"  # which a user may give


def open_tokenizer(
    name: str = "gpt2", vocab_file: str | None = None, merge_file: str | None = None, begin: bool = False
) -> Tokenizer:
    """Open the tokenizer `name`: "bytes", one of tiktoken's encodings ("gpt2", ...), a file or a folder with one; or
    the BPE of two files. begin: a file of SentencePiece or tiktoken opens each text with its begin of text; in a folder
    it does so where `opens_texts` says so, while a tokenizer.json does what it says itself. Raises UserError if a file
    cannot be read or is of another kind, or an encoding is not at hand."""
    check_named_once(name, vocab_file, merge_file)
    if vocab_file is not None and merge_file is not None:
        return from_files(Path(vocab_file), Path(merge_file))
    if name == "bytes":
        return make_tokenizer("bytes", [], 0)
    path = Path(name)
    if path.is_dir():
        found, begin = tokenizer_file(path), begin or opens_texts(path)
        if found is None:
            raise UserError(f"{path} has no tokenizer (none of {', '.join(NAMES)}); give a folder or file with one")
        path = found
        if path.name == "vocab.json":
            check_pre_tokenization(path.parent)
            tokenizer = from_files(path, path.with_name("merges.txt"))
            tokenizer.chat_template = template_beside(path)
            return tokenizer
    if path.exists():
        tokenizer = _from_file(path, begin)
        tokenizer.chat_template = tokenizer.chat_template or template_beside(path)
        return tokenizer
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(["bytes", *tiktoken.list_encoding_names()])
        raise UserError(f"the tokenizer {name} is neither a file nor one of {known}; give {FILES}")
    return from_tiktoken(name)


def check_named_once(name: str, vocab_file: str | None, merge_file: str | None) -> None:
    """Raise UserError if one of the two files is missing, or they are given with the name of another tokenizer."""
    if (vocab_file is None) != (merge_file is None):
        raise UserError("the vocab file and the merge file belong together; give both, vocab.json and merges.txt")
    if vocab_file is not None and name != "gpt2":
        raise UserError(f"the tokenizer {name} and the vocab file {vocab_file} are both given; leave one out")


def make_tokenizer(kind: str, documents: Iterable[str], bpe_vocab_size: int) -> ByteLevel | Char:
    """Make the tokenizer `kind`: "bpe", trained on the documents; "char", the characters of the documents; "gpt2", as
    tiktoken carries it (from its cache, or fetched by it once); or "bytes", the 256 bytes. Raises UserError if it
    cannot be made."""
    if kind == "char":
        return Char.of_texts(list(documents))
    if kind == "gpt2":
        return from_tiktoken("gpt2")
    if kind == "bytes":
        return ByteLevel("bytes", PATTERN, [bytes([b]) for b in range(256)])
    return ByteLevel("bpe", PATTERN, train_ranks(documents, bpe_vocab_size))


def from_tiktoken(name: str) -> ByteLevel:
    """Open one of tiktoken's encodings. Raises UserError if it is not at hand."""
    try:
        return ByteLevel.from_encoding(tiktoken.get_encoding(name))
    except Exception as error:  # tiktoken passes on any exception of its download
        raise UserError(
            f"the vocabulary of {name} is not in tiktoken's cache and could not be fetched ({type(error).__name__}); "
            f"connect once, set TIKTOKEN_CACHE_DIR to a filled cache, give {FILES}, or use another tokenizer"
        ) from None


def read_saved(path: Path, remedy: str) -> Tokenizer:
    """Return what `Tokenizer.save` wrote. Raise UserError, with `remedy`, where the file is not that, was changed
    since, or a package is missing."""
    saved = read_json(path, remedy, LARGEST)
    try:
        if CHECKSUM in saved and saved.pop(CHECKSUM) != checksum(saved):  # older runs have none
            raise ValueError("its content is not what was written")
        with panics_as_user_errors(str(path)):
            template = saved.pop(CHAT_TEMPLATE, None)
            tokenizer = _from_json(saved)
            if template is not None:
                tokenizer.chat_template = ChatTemplate(template["source"], template["tokens"])
            tokenizer.encode("")  # a pattern that is none is found here and not in the middle of the work
        return tokenizer
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {error}); {remedy}") from None


def _from_json(saved: dict[str, Any]) -> Tokenizer:
    if "characters" in saved:
        return Char(saved["characters"])
    if "ids" in saved:
        return Ids(saved["ids"])
    if "sentencepiece" in saved:
        return SentencePiece(saved["name"], base64.b64decode(saved["sentencepiece"], validate=True), saved["begin"])
    if "tokenizer_json" in saved:
        return TokenizerJson(saved["name"], saved["tokenizer_json"], saved["end"])
    ranks = [base64.b64decode(token, validate=True) for token in saved["ranks"]]
    if "specials" not in saved:  # of an older run
        return ByteLevel(saved["name"], saved["pattern"], ranks)
    ends = (saved["end"],) if saved["end"] is not None else ()
    sizes = saved["vocab_size"], saved["num_tokens"]
    if not all(is_id(size) for size in (*sizes, *saved["specials"].values())):
        raise ValueError(f"its ids and sizes must be in 0 to {MOST - 1}")
    rare = {name: saved[name] for name in ("begin", "opens", "composed") if name in saved}
    return ByteLevel(saved["name"], saved["pattern"], ranks, saved["specials"], ends, *sizes, **rare)


def is_id(value: object) -> bool:
    """Return whether `value` is a token's id; a larger one would claim memory for all the ids below it."""
    return type(value) is int and 0 <= value < MOST


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
    return ByteLevel(name, PATTERN, by_id(pairs.ids), pairs.specials, ends, largest + 1, count)


def _from_file(path: Path, begin: bool) -> Tokenizer:
    if path.name == "meta.pkl":
        if (tokenizer := read_meta(path)) is None:
            raise UserError(f"{path} names no characters (it has no stoi); give another tokenizer")
        return tokenizer
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
    if isinstance(saved, dict) and not saved.keys().isdisjoint(SAVED):
        return read_saved(path, remedy="make it again with dtgpt tokenizer train, or copy it from its run")
    if not isinstance(saved, dict) or not isinstance(saved.get("model"), dict):
        raise UserError(f"{path} is not a tokenizer; give a tokenizer.json, or what dtgpt tokenizer train wrote")
    _check_tokenizer_json(saved, path)
    names = [token["content"] for token in saved.get("added_tokens") or []]
    check_has_added(path, lambda token: token["content"] in names)
    if characters := Char.of_tokenizer_json(saved):
        return characters
    end = end_of_text_beside(path)
    pairs = _plain_byte_pairs(saved)
    if pairs is None:
        return TokenizerJson(str(path), content, end)
    return _byte_level(str(path), pairs, saved["model"]["vocab"], end)


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
            and not any(model.get(name) for name in ("dropout", "byte_fallback", "continuing_subword_prefix",
                                                     "end_of_word_suffix", "unk_token", "ignore_merges"))
            and saved.get("normalizer") is None
            and _adds_nothing(saved.get("post_processor"))
            and before.get("type") == "ByteLevel"
            and before.get("use_regex", True)
            and not before.get("add_prefix_space", True)
        )  # fmt: skip
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


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer that the run in this folder was trained with."""
    return read_saved(folder / "tokenizer.json", remedy="copy it from another run on the same data")

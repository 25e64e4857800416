"""Token ids in files: what samples are drawn from, and shards without an index.

llm.c's shards have a header of 256 int32 (magic, version, tokens), then tokens: uint16 of GPT-2, with an end-of-text
token *before* each document, or uint32 of Llama 3, with its begin of text there (its dev/data/data_common.py and
fineweb.py). nanoGPT's are uint16 tokens without a header, and an end-of-text token *after* each document (its
data/openwebtext/prepare.py); so are those that `numpy.save` wrote, whose header names their type. A document that goes
on in the next shard is two sequences here.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from glob import glob
from pathlib import Path
from tokenize import TokenError
from typing import NamedTuple

import numpy as np

from dtgpt.data.cached.file_array import Array, FileArray, OpenFile, open_file, open_npy
from dtgpt.util.errors import UserError
from dtgpt.util.rules import Is, Other, Rule, Rules, check_rules

LLMC_HEADER = 256 * 4  # bytes
LLMC_MAGIC, LLMC_LLAMA_MAGIC = 20240520, 20240801
LLMC = {LLMC_MAGIC: (1, "<u2"), LLMC_LLAMA_MAGIC: (7, "<u4")}  # magic: version, type of the tokens
ZIP = b"PK\x03\x04"
SHARD_RULES: Rules = (  # of a file that is not what `numpy.save` writes
    Rule(
        "{path} is a zip archive, as numpy.savez and torch.save write; save its tokens with numpy.save",
        Is("begin", "==", ZIP),
    ),
    Rule(
        "{path} does not begin as what numpy.save writes, so that the type of its tokens is not known: uint16 or "
        "uint32, as Dolma and OLMo name them; {remedy_npy}",
        Is("path.suffix", "==", ".npy"),
    ),
)
LLMC_RULES: Rules = (  # of a shard's header, the file's size, and the size that the header asks for
    Rule(
        f"{{path}} ends at byte {{size}}, inside its header of {LLMC_HEADER} bytes; copy or build it again",
        Is("size", "<", LLMC_HEADER),
    ),
    Rule(
        "{path} has version {version} at byte 4, dtgpt reads {known}; build it with llm.c today",
        Is("version", "!=", Other("known")),
    ),
    Rule(
        "{path} has {size} bytes, but by its header (byte 8: {count} tokens) it ends at byte {end}; it is truncated or "
        "was changed: copy or build it again",
        Is("size", "!=", Other("end")),
    ),
)
NPY = b"\x93NUMPY"  # with which what `numpy.save` writes begins
HIGHEST = 16  # upper halves of ids of 32 bits are below, for a vocabulary of up to a million
SCAN = 1 << 22  # tokens searched for document ends together
PIECES, PIECE = 256, 1 << 13  # of a dataset's tokens that its content digest reads: how many, and tokens of each


def shard_paths(path: str) -> list[str]:
    """Return the file of this name, or, where there is none, those that `path` matches as a glob, sorted."""
    return [path] if os.path.lexists(path) else sorted(glob(path))


def pieces(tokens: FileArray, most: int) -> Iterator[np.ndarray]:
    """Yield `most` pieces in equal distances, including the first and the last, or all tokens if they are fewer."""
    count = len(tokens)
    if count <= most * PIECE:
        begins = list(range(0, count, PIECE))
    else:
        begins = [i * (count - PIECE) // (most - 1) for i in range(most)]
    for begin in begins:
        yield tokens[begin : begin + PIECE]


class TokenSequences(ABC):
    """Sequences of tokens on disk: what samples are drawn from. `name` in messages; `lengths [S]` in tokens; `dtype`
    of the token ids; `stored`: all tokens of each file."""

    name: str
    lengths: Array
    dtype: np.dtype
    stored: list[FileArray]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    @abstractmethod
    def digest(self) -> str:
        """Return the digest of what decides the order of samples."""

    @property
    def most_pieces(self) -> int:
        """Return the number of pieces of each file that the content digest reads."""
        return max(2, PIECES // len(self.stored))

    @cached_property
    def content_digest(self) -> str:
        """Return the SHA-256 of the tokens, or of PIECES pieces of many tokens, which is quick for any size. It differs
        for other data of the same lengths, but not for one changed token between two pieces."""
        digest = hashlib.sha256(self.dtype.str.encode())
        for tokens in self.stored:
            digest.update(f" {len(tokens)} ".encode())
            for piece in pieces(tokens, self.most_pieces):
                digest.update(piece.data)
        return digest.hexdigest()

    @abstractmethod
    def read(self, sequences: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Read P pieces one after another: `counts` tokens of `sequences` from token `begins`, all int64 [P]."""

    def window(self, i: int, begin: int = 0, count: int | None = None) -> np.ndarray:
        """Return `count` tokens (None: all that follow) of sequence `i` from token `begin`. Raises IndexError."""
        if not 0 <= i < len(self):
            raise IndexError(f"sequence {i} of {len(self)}")
        length = int(self.lengths[i])
        count = length - begin if count is None else int(count)
        if begin < 0 or count < 0 or begin + count > length:
            raise IndexError(f"tokens {begin} to {begin + count} of a sequence of {length}")
        return self.read(*(np.array([number], np.int64) for number in (i, begin, count)))


class TokenShards(TokenSequences):
    """Shards of llm.c, nanoGPT or `numpy.save`, one after another. `eot`: the end-of-text token, which separates
    documents; None: each file is one sequence. `begin`: the begin of text, which does so in llm.c's shards of Llama 3.
    Raises UserError, with the byte that disagrees, for a file that is not whole, and for one whose tokens do not have
    the type that it says."""

    def __init__(self, paths: Sequence[Path | str], eot: int | None = None, begin: int | None = None):
        if not paths:
            raise UserError("no token shards are given; give at least one .bin file of llm.c or nanoGPT")
        self.eot = eot
        self.paths = [Path(path) for path in paths]
        self.name = f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}"
        shards = [_open_shard(path) for path in self.paths]
        self.stored = [shard.tokens for shard in shards]
        types = {tokens.dtype for tokens in self.stored}
        self.dtype = types.pop() if len(types) == 1 else np.dtype("<i8")
        between = [begin if eot is not None and begin is not None and shard.is_llama else eot for shard in shards]
        lengths = [
            _sequence_lengths(shard.tokens, token, shard.token_first)
            for shard, token in zip(shards, between, strict=True)
        ]
        self._first = np.cumsum([0, *map(len, lengths)])  # sequence with which each shard begins
        wide = np.concatenate(lengths)
        # Positions are counted through all shards; `_bases` is where each shard begins.
        self._begins = np.cumsum(wide) - wide
        self._bases = np.cumsum([0, *map(len, self.stored)])
        self.lengths = wide if wide.size and wide.max() > np.iinfo(np.int32).max else wide.astype(np.int32)

    @property
    def num_tokens(self) -> int:
        return int(self._bases[-1])

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the lengths of the sequences."""
        return hashlib.sha256(b"shards" + np.asarray(self.lengths, "<i8").tobytes()).hexdigest()

    def read(self, sequences: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
        shard_of = np.searchsorted(self._first, sequences, side="right") - 1
        places = self._begins[sequences] - self._bases[shard_of] + begins
        if len(self.stored) == 1:
            return self.stored[0].gather(places, counts)
        tokens = np.empty(int(counts.sum()), self.dtype)
        of_token = np.repeat(shard_of, counts)
        for shard in np.unique(shard_of):
            mine = shard_of == shard
            tokens[of_token == shard] = self.stored[shard].gather(places[mine], counts[mine])
        return tokens


class Shard(NamedTuple):
    """`token_first`: whether documents begin, and do not end, with the token that separates them."""

    tokens: FileArray
    token_first: bool = False
    is_llama: bool = False


def _open_shard(path: Path) -> Shard:
    """Open a file by what it begins with. Raises UserError."""
    file = open_file(path)
    head = file.read(0, min(file.size, 12)).ljust(12, b"\0")
    if head.startswith(NPY):
        return _open_numpy(file)
    values = {"path": path, "begin": head[: len(ZIP)], "remedy_npy": _with_header(path, "<u4 or <u2")}
    check_rules(SHARD_RULES, values)
    magic, version, count = np.frombuffer(head, "<i4").tolist()
    if magic in LLMC:  # ids of GPT-2 cannot spell it: its upper half would be token 55432 or above
        return _open_llmc(file, magic, version, count)
    if file.size == 0 or file.size % 2:
        raise UserError(
            f"{path} has {file.size} bytes, which are not uint16 tokens (byte {file.size - file.size % 2} has no "
            "second half); it is truncated or not a shard of nanoGPT or llm.c: copy or build it again"
        )
    tokens = FileArray(file, "<u2", 0, file.size // 2)
    if _is_wide(next(filter(np.any, pieces(tokens, PIECES)), tokens[:0])):  # a file may begin with padding
        raise UserError(
            f"{path} has next to nothing in every second 16-bit word, as ids of 32 bits or more have, and a .bin "
            f"without a header is read as uint16; {_with_header(path, '<u4')}"
        )
    return Shard(tokens)


def _with_header(path: Path, dtype: str) -> str:
    """Return the remedy for a file whose tokens have another type."""
    target = path.with_name(f"{path.stem}_tokens.npy")
    return (
        'give it a header that names the type, which dtgpt reads: python -c "import numpy as n; '
        f"n.save('{target}', n.memmap('{path}', '{dtype}', 'r'))\""
    )


def _is_wide(words: np.ndarray) -> bool:
    """Return whether 16-bit words are halves of wider ids, of either order of bytes: the upper ones are zero, or tiny
    where there are many words, and the others are not."""
    for lower, upper in ((words[::2], words[1::2]), (words[1::2], words[::2].byteswap())):
        if len(words) >= 16 and not upper.any() and lower.max() > 1:
            return True
        if len(words) >= 256 and upper.max() < HIGHEST <= lower.max():
            return True
    return False


def _open_numpy(file: OpenFile) -> Shard:
    try:
        tokens = open_npy(file)
    except (ValueError, SyntaxError, TokenError) as error:
        raise UserError(f"{file.path} is damaged ({error}); write it with numpy.save again") from None
    if tokens.dtype.kind not in "iu" or len(tokens.shape) != 1:
        raise UserError(
            f"{file.path} has {tokens.dtype} in the shape {tokens.shape}, and tokens are whole numbers in one row; "
            "save such an array"
        )
    return Shard(tokens)


def _open_llmc(file: OpenFile, magic: int, version: int, count: int) -> Shard:
    known, dtype = LLMC[magic]
    end = LLMC_HEADER + np.dtype(dtype).itemsize * count
    values = {"path": file.path, "size": file.size, "version": version, "known": known, "count": count, "end": end}
    check_rules(LLMC_RULES, values)
    return Shard(FileArray(file, dtype, LLMC_HEADER, count), token_first=True, is_llama=magic == LLMC_LLAMA_MAGIC)


def _sequence_lengths(shard: FileArray, eot: int | None, eot_first: bool) -> np.ndarray:
    """Return the lengths int64 of the sequences, which cover the shard."""
    count, cuts = len(shard), []
    for begin in range(0, count if eot is not None else 0, SCAN):
        found = np.flatnonzero(shard[begin : begin + SCAN] == eot)
        cuts.append(found + begin + (0 if eot_first else 1))
    return np.diff(np.unique(np.concatenate([[0], *cuts, [count]]).astype(np.int64)))

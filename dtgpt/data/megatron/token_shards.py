"""Token ids in files: what samples are drawn from, and shards without an index.

llm.c's shards have a header of 256 int32 (magic, version, tokens), then uint16 tokens, and an end-of-text token
*before* each document (its dev/data/data_common.py and fineweb.py). nanoGPT's are uint16 tokens without a header, and
an end-of-text token *after* each document (its data/openwebtext/prepare.py). A document that goes on in the next shard
is two sequences here.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from glob import glob
from pathlib import Path

import numpy as np

from dtgpt.data.file_array import Array, FileArray, open_file
from dtgpt.util.errors import UserError

LLMC_HEADER = 256 * 4  # bytes
LLMC_MAGIC, LLMC_VERSION = 20240520, 1
LLMC_LLAMA_MAGIC = 20240801
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
    """Shards of llm.c or nanoGPT, one after another. `eot`: the end-of-text token, which separates documents;
    None: each file is one sequence. Raises UserError, with the byte that disagrees, for a file that is not whole."""

    def __init__(self, paths: Sequence[Path | str], eot: int | None = None):
        if not paths:
            raise UserError("no token shards are given; give at least one .bin file of llm.c or nanoGPT")
        self.dtype, self.eot = np.dtype("<u2"), eot
        self.paths = [Path(path) for path in paths]
        self.name = f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}"
        shards = [_open_shard(path) for path in self.paths]
        self.stored = [shard for shard, _ in shards]
        lengths = [_sequence_lengths(shard, eot, eot_first) for shard, eot_first in shards]
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


def _open_shard(path: Path) -> tuple[FileArray, bool]:
    """Return the tokens of a file, and whether its documents begin (not end) with the end-of-text token."""
    file = open_file(path)
    size = file.size
    magic, version, count = np.frombuffer(file.read(0, min(size, 12)).ljust(12, b"\0"), "<i4").tolist()
    if magic == LLMC_LLAMA_MAGIC:
        raise UserError(f"{path} holds tokens of llm.c's Llama format, not GPT-2; tokenize for gpt-2")
    if magic != LLMC_MAGIC:  # ids of GPT-2 cannot spell it: its upper half would be token 55432
        if size == 0 or size % 2:
            raise UserError(
                f"{path} has {size} bytes, which are not uint16 tokens (byte {size - size % 2} has no second half); "
                "it is truncated or not a shard of nanoGPT or llm.c: copy or build it again"
            )
        return FileArray(file, "<u2", 0, size // 2), False
    if size < LLMC_HEADER:
        raise UserError(f"{path} ends at byte {size}, inside its header of {LLMC_HEADER} bytes; copy or build it again")
    if version != LLMC_VERSION:
        raise UserError(
            f"{path} has version {version} at byte 4, dtgpt reads {LLMC_VERSION}; build it with llm.c today"
        )
    if size != LLMC_HEADER + 2 * count:
        raise UserError(
            f"{path} has {size} bytes, but by its header (byte 8: {count} tokens) it ends at byte "
            f"{LLMC_HEADER + 2 * count}; it is truncated or was changed: copy or build it again"
        )
    return FileArray(file, "<u2", LLMC_HEADER, count), True


def _sequence_lengths(shard: FileArray, eot: int | None, eot_first: bool) -> np.ndarray:
    """Return the lengths int64 of the sequences, which cover the shard."""
    count, cuts = len(shard), []
    for begin in range(0, count if eot is not None else 0, SCAN):
        found = np.flatnonzero(shard[begin : begin + SCAN] == eot)
        cuts.append(found + begin + (0 if eot_first else 1))
    return np.diff(np.unique(np.concatenate([[0], *cuts, [count]]).astype(np.int64)))

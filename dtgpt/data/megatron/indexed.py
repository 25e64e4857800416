"""Megatron-LM's indexed datasets: tokens in `<prefix>.bin`, where each sequence lies in `<prefix>.idx`.

`.bin` holds token ids back to back. `.idx`, little-endian and unpadded: 9 bytes of magic, u64 version, u8 code of the
token type, u64 S sequences, u64 D, then int32 lengths [S] in tokens, int64 offsets [S] in bytes of the .bin, and int64
documents [D]: 0, then after each document the number of sequences so far. GPT's samples take sequences for documents.
Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py; the bytes are those of its writer since 2019.
"""

import hashlib
import os
import secrets
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from dtgpt.data.cached.file_array import FileArray, open_file
from dtgpt.data.megatron.paths import bin_path, idx_path, tokenizer_path, weights_path
from dtgpt.data.megatron.token_shards import TokenSequences
from dtgpt.util.errors import UserError, remedy
from dtgpt.util.rules import Is, Other, Rule, Rules, check_rules
from dtgpt.util.storage import create_file, sync_path, temporary_path

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, code, S, D
VERSION = 1
CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are float64 and float32
SMALL_VOCABULARY = 65500  # below it token ids are stored in 16 bits
BLOCK = 1 << 20  # entries of an index looked at together
AGAIN = "; copy or build the dataset again"
COUNTS = "{sequences} sequences and {documents} document bounds take {expected} bytes"
HEADER_RULES: Rules = (  # of what it unpacks to, the file's size, and the size that it asks for
    Rule(
        f"{{path}} is not a whole index (byte 0: it begins with {{magic!r}}, not with Megatron-LM's {MAGIC!r}){AGAIN}",
        Is("magic", "!=", MAGIC),
    ),
    Rule(
        f"{{path}} is not a whole index (byte 9: its version is {{version}}, not {VERSION}){AGAIN}",
        Is("version", "!=", VERSION),
    ),
    Rule(
        "{path} is not a whole index (byte 17: the code {code} of its token type is not one of "
        f"{', '.join(map(str, CODES))}){AGAIN}",
        Is("code", "not in", CODES),
    ),
    Rule(
        f"{{path}} is not a whole index (byte {{size}}: it ends there, but {COUNTS}){AGAIN}",
        Is("size", "<", Other("expected")),
    ),
    Rule(
        f"{{path}} is not a whole index (byte {{expected}}: it goes on there, but {COUNTS}){AGAIN}",
        Is("size", ">", Other("expected")),
    ),
)


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the type in which Megatron-LM stores the ids of a vocabulary (its true size, unpadded)."""
    return np.dtype("<u2" if vocab_size < SMALL_VOCABULARY else "<i4")


class IndexedDataset(TokenSequences):
    """A .bin and its .idx: `lengths` int32 [S] in tokens, `offsets` int64 [S] in bytes, `documents` int64 [D]. Raises
    UserError, with the byte that disagrees, if the two files are not whole and of one piece."""

    def __init__(self, prefix: Path | str, files: tuple[Path, Path] | None = None):
        """files: the .bin and the .idx, if they do not have their names yet."""
        self.prefix, self.name = Path(prefix), str(prefix)
        path, self._path = files or (bin_path(prefix), idx_path(prefix))
        self._index = open_file(self._path)
        self.dtype, sequences, documents = self._header()
        self.lengths = FileArray(self._index, "<i4", HEADER.size, sequences)
        self.offsets = FileArray(self._index, "<i8", HEADER.size + 4 * sequences, sequences)
        self.documents = FileArray(self._index, "<i8", HEADER.size + 12 * sequences, documents)
        num_bytes = self._check_offsets()
        self._check_documents()
        file = open_file(path)
        if file.size != num_bytes:
            raise UserError(
                f"{path} has {file.size} bytes, but by {self._path} its last sequence ends at byte {num_bytes}; "
                "one of them is truncated or of another dataset: copy or build both again"
            )
        self._tokens = FileArray(file, self.dtype, 0, num_bytes // self.dtype.itemsize)
        self.stored = [self._tokens]
        self.weights = self._open_weights(prefix)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the .idx."""
        digest = hashlib.sha256()
        for chunk in self._index.chunks():
            digest.update(chunk)
        return digest.hexdigest()

    def read(self, sequences: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
        return self._tokens.gather(self.offsets[sequences] // self.dtype.itemsize + begins, counts)

    def read_weights(self, sequences: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Read the weights of the first `counts` tokens of sequences, both int64 [P], one after another."""
        assert self.weights is not None
        return self.weights.gather(self.offsets[sequences] // self.dtype.itemsize, counts)

    @cached_property
    def weights_digest(self) -> str:
        """Return the SHA-256 of the weights."""
        assert self.weights is not None
        digest = hashlib.sha256()
        for chunk in self.weights.file.chunks():
            digest.update(chunk)
        return digest.hexdigest()

    def _open_weights(self, prefix: Path | str) -> FileArray | None:
        path = weights_path(prefix)
        if not os.path.isfile(path):  # which, unlike Path.is_file, takes names too long for a file
            return None
        file = open_file(path)
        if file.size != self.num_tokens:
            raise UserError(
                f"{path} has {file.size} bytes for {self.num_tokens} tokens; one of them is truncated or of another "
                "dataset: prepare the chats again"
            )
        return FileArray(file, "u1", 0, file.size)

    def _header(self) -> tuple[np.dtype, int, int]:
        size = self._index.size
        if size < HEADER.size:
            raise self._damaged(size, f"it ends inside its header of {HEADER.size} bytes")
        magic, version, code, sequences, documents = HEADER.unpack(self._index.read(0, HEADER.size))
        values = {
            "path": self._path,
            "magic": magic,
            "version": version,
            "code": code,
            "sequences": sequences,
            "documents": documents,
            "size": size,
            "expected": HEADER.size + 12 * sequences + 8 * documents,
        }
        check_rules(HEADER_RULES, values)
        return np.dtype(CODES[code]), sequences, documents

    def _check_offsets(self) -> int:
        """Check that sequences follow each other without a gap, and return the byte at which the last one ends."""
        end = 0
        for first in range(0, len(self.lengths), BLOCK):
            lengths = self.lengths[first : first + BLOCK].astype(np.int64)
            if lengths.min() < 0:
                i = first + int(np.argmax(lengths < 0))
                raise self._damaged(HEADER.size + 4 * i, f"sequence {i} would have {self.lengths[i]} tokens")
            ends = end + np.cumsum(lengths) * self.dtype.itemsize
            begins = ends - lengths * self.dtype.itemsize
            wrong = self.offsets[first : first + BLOCK] != begins
            if wrong.any():
                i = first + int(np.argmax(wrong))
                where = HEADER.size + 4 * len(self.lengths) + 8 * i
                expected = f"the one before it ends at {begins[i - first]}"
                raise self._damaged(
                    where, f"sequence {i} would begin at byte {self.offsets[i]} of the .bin, {expected}"
                )
            end = int(ends[-1])
        return end

    def _check_documents(self) -> None:
        where, bounds = HEADER.size + 12 * len(self.lengths), self.documents
        if len(bounds) == 0 or bounds[0] != 0:
            raise self._damaged(where, "its document index does not begin with 0")
        for first in range(0, len(bounds), BLOCK):
            block = bounds[first : first + BLOCK + 1].astype(np.int64)
            if (np.diff(block) < 0).any():
                i = first + 1 + int(np.argmax(np.diff(block) < 0))
                raise self._damaged(where + 8 * i, f"bound {i} of its documents is {bounds[i]}, below the one before")
        if bounds[-1] != len(self.lengths):
            last = where + 8 * (len(bounds) - 1)
            raise self._damaged(last, f"its last document ends at {bounds[-1]} of {len(self.lengths)} sequences")

    def _damaged(self, byte: int, reason: str) -> UserError:
        return UserError(f"{self._path} is not a whole index (byte {byte}: {reason}){AGAIN}")


class IndexedWriter:
    """Write a dataset sequence by sequence, as a context: under temporary names until all is on the disk, so that
    `<prefix>.idx` never exists without its whole .bin. An error in the context leaves no files. `seal` all writers
    of datasets that belong together first: then none is in place if the disk is too full for another.

    Raises UserError if a token does not fit `dtype` or the files cannot be written.
    """

    def __init__(
        self, prefix: Path | str, dtype: np.dtype | type, tokenizer: str | None = None, weighted: bool = False
    ):
        """tokenizer: what `Tokenizer.dumps` returns, if the tokenizer is known. weighted: each token has a weight."""
        self._tokenizer, self._weighted = tokenizer, weighted
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype).newbyteorder("<")
        self._code = next((c for c, name in CODES.items() if np.dtype(name) == self.dtype), None)
        if self._code is None:
            raise UserError(f"tokens cannot be stored as {np.dtype(dtype)}; use one of {', '.join(CODES.values())}")
        self._lengths, self._documents = array("i"), array("q", [0])  # of 4 and 8 bytes
        mark = secrets.token_hex(4)
        paths = bin_path(prefix), tokenizer_path(prefix), weights_path(prefix), idx_path(prefix)
        self._partial = {path: temporary_path(path, mark) for path in paths}

    def __enter__(self) -> Self:
        with self._user_errors():
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._file = create_file(self._partial[bin_path(self.prefix)], 1 << 20)
            if self._weighted:
                self._weights = create_file(self._partial[weights_path(self.prefix)], 1 << 20)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None:
                self.seal()
                self._put_in_place()
        finally:
            with suppress(OSError):  # of the flush, if the disk is full
                self._file.close()
                if self._weighted:
                    self._weights.close()
            for path in self._partial.values():
                path.unlink(missing_ok=True)

    def seal(self) -> None:
        """Bring all to the disk, so that leaving the context only renames; nothing can be added any more. Raises
        UserError if the files cannot be written."""
        if self._file.closed:
            return
        if self._documents[-1] != len(self._lengths):
            self.end_document()
        data, tokenizer, weights, index = self._partial.values()
        with self._user_errors():
            self._file.close()
            sync_path(data)
            if self._weighted:
                self._weights.close()
                sync_path(weights)
            if self._tokenizer is not None:
                tokenizer.write_text(self._tokenizer)
                sync_path(tokenizer)
            with create_file(index) as file:
                self._write_index(file.write)
            sync_path(index)

    def append(self, tokens: ArrayLike) -> None:
        """Add one sequence to the current document."""
        tokens = np.asarray(tokens)
        self.extend(tokens, [tokens.size])

    def extend(
        self,
        tokens: ArrayLike,
        lengths: ArrayLike,
        counts: np.ndarray | None = None,
        weights: np.ndarray | None = None,
    ) -> None:
        """Add several sequences, whose tokens lie one after another. counts: of the sequences in each document; None:
        they belong to the current document. weights: uint8, of the tokens of a dataset that is `weighted`."""
        lengths = np.asarray(lengths)
        stored = self._stored(np.asarray(tokens))
        if (lengths.size and (lengths.min() < 0 or lengths.max() >= 2**31)) or lengths.sum() != stored.size:
            raise ValueError(f"{stored.size} tokens are not sequences of {lengths} tokens")
        if (weights is not None) != self._weighted or (weights is not None and len(weights) != stored.size):
            raise ValueError(f"{stored.size} tokens have other weights than the dataset")
        self._write(stored)
        if weights is not None:
            with self._user_errors():
                self._weights.write(weights.astype(np.uint8).tobytes())
        if counts is not None:
            self._documents.frombytes((len(self._lengths) + np.cumsum(counts, dtype=np.int64)).tobytes())
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())

    def end_document(self) -> None:
        """Make the sequences since the last call, perhaps none, a document. Those left at the end are one, too."""
        self._documents.append(len(self._lengths))

    def extend_from(self, dataset: IndexedDataset) -> None:
        """Add all sequences and documents of a dataset. Raises UserError if its token type is another."""
        if dataset.dtype != self.dtype:
            raise UserError(
                f"{dataset.prefix} holds tokens of type {dataset.dtype}, the datasets before it {self.dtype}; merge "
                "datasets of one vocabulary, or tokenize one of them again"
            )
        first, (tokens,) = len(self._lengths), dataset.stored
        for begin in range(0, len(tokens), BLOCK):
            self._write(tokens[begin : begin + BLOCK])
        self._lengths.frombytes(dataset.lengths[:].tobytes())
        self._documents.frombytes((dataset.documents[1:] + first).tobytes())

    def _write(self, tokens: np.ndarray) -> None:
        with self._user_errors():
            self._file.write(tokens.tobytes())

    def _stored(self, tokens: np.ndarray) -> np.ndarray:
        if tokens.dtype == self.dtype or tokens.size == 0:
            return tokens.astype(self.dtype)
        limits = np.iinfo(self.dtype)
        if tokens.dtype.kind not in "iu" or tokens.min() < limits.min or tokens.max() > limits.max:
            raise UserError(
                f"tokens {tokens.min()} to {tokens.max()} ({tokens.dtype}) do not fit the type {self.dtype} of "
                f"{bin_path(self.prefix)}; take the type by the vocabulary's size, as token_dtype does"
            )
        return tokens.astype(self.dtype)

    def _put_in_place(self) -> None:
        with self._user_errors():
            for former in (tokenizer_path, weights_path, idx_path):  # of files that do not fit the new .bin
                former(self.prefix).unlink(missing_ok=True)
            for target, partial in self._partial.items():  # the index last
                if partial.exists():
                    partial.rename(target)
            sync_path(self.prefix.parent)

    def _write_index(self, write: Callable) -> None:
        lengths, documents = np.frombuffer(self._lengths, np.int32), np.frombuffer(self._documents, np.int64)
        write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(documents)))
        write(lengths.astype("<i4", copy=False).data)
        sizes = lengths.astype("<i8") * self.dtype.itemsize
        write((np.cumsum(sizes) - sizes).data)
        write(documents.astype("<i8", copy=False).data)

    @contextmanager
    def _user_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            path, advice = bin_path(self.prefix), remedy(error, "choose another folder")
            raise UserError(f"{path} cannot be written ({error.strerror}); {advice}") from None


def merge(prefixes: Iterable[Path | str], target: Path | str, tokenizer: str | None = None) -> None:
    """Write the datasets `prefixes` one after another as `target`, with the tokenizer as `IndexedWriter` takes it.
    Raises UserError if their token types differ."""
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    if not datasets:
        raise UserError(f"no datasets are given of which {target} would consist; give the prefix of at least one")
    if weighted := next((dataset for dataset in datasets if dataset.weights is not None), None):
        raise UserError(
            f"{weighted.name} holds chats, which are not joined; give all their files to one dtgpt prepare --chat, or "
            "--preferences where they hold pairs"
        )
    with IndexedWriter(target, datasets[0].dtype, tokenizer) as writer:
        for dataset in datasets:
            writer.extend_from(dataset)

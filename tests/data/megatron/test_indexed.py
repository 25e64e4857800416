"""Datasets on disk: the bytes are Megatron-LM's, what is written is read, and nothing that is not whole is believed."""

import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from dtgpt.data.megatron import token_shards
from dtgpt.data.megatron.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path, merge, token_dtype
from dtgpt.data.megatron.token_shards import TokenShards
from dtgpt.util.errors import UserError

GOLDEN_IDX = (
    "4d4d494449445800 00 0100000000000000 08 0200000000000000 0300000000000000 05000000 03000000 0000000000000000"
    "0a00000000000000 0000000000000000 0100000000000000 0200000000000000"
)
GOLDEN_BIN = "0100 0200 0300 0400 6300 0500 0600 6300"


def write(prefix, documents, dtype=np.uint16):
    """`documents`: lists of sequences."""
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            for sequence in document:
                writer.append(sequence)
            writer.end_document()
    return Path(prefix)


def same(dataset, documents):
    sequences = [s for document in documents for s in document]
    assert len(dataset) == len(sequences)
    assert dataset.num_tokens == sum(map(len, sequences))
    assert dataset.documents.tolist() == np.cumsum([0, *map(len, documents)]).tolist()
    for i, sequence in enumerate(sequences):
        assert dataset.window(i).dtype == dataset.dtype
        assert dataset.window(i).tolist() == list(sequence)


@pytest.fixture
def whole(tmp_path):
    return write(tmp_path / "whole", [[[1, 2, 3], [4]], [[5, 6, 7, 8, 9]]])


def test_the_bytes_are_those_of_megatron(tmp_path):
    prefix = write(tmp_path / "a.b", [[[1, 2, 3, 4, 99]], [[5, 6, 99]]])
    assert idx_path(prefix).read_bytes() == bytes.fromhex(GOLDEN_IDX)
    assert bin_path(prefix).read_bytes() == bytes.fromhex(GOLDEN_BIN)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.b.bin", "a.b.idx"]


def test_sequences_may_come_many_at_a_time(tmp_path):
    with IndexedWriter(tmp_path / "folder" / "many", np.int32) as writer:
        writer.extend(np.arange(6), [2, 0, 4])
        writer.end_document()
        writer.append([])
        writer.extend([], [])
        writer.append(np.array([2**31 - 1], np.uint64))
        with pytest.raises(ValueError, match="3 tokens are not sequences"):
            writer.extend([1, 2, 3], [2])
    dataset = IndexedDataset(tmp_path / "folder" / "many")
    assert dataset.lengths.tolist() == [2, 0, 4, 0, 1] and dataset.offsets.tolist() == [0, 8, 8, 24, 24]
    assert dataset.window(2).tolist() == [2, 3, 4, 5] and dataset.window(4).tolist() == [2**31 - 1]


@pytest.mark.parametrize("place", [0, 3, 8_001, 15_996])
def test_the_content_digest_reads_little_and_both_ends(tmp_path, monkeypatch, place):
    monkeypatch.setattr(token_shards, "PIECES", 5)
    monkeypatch.setattr(token_shards, "PIECE", 4)  # from tokens 0, 3999, 7998, 11997 and 15996 on
    tokens = np.arange(16_000)
    before = IndexedDataset(write(tmp_path / "a", [[tokens]]))
    read = [piece.tolist() for piece in token_shards.pieces(before.stored[0], 5)]
    assert [piece[0] for piece in read] == [0, 3999, 7998, 11997, 15996] and set(map(len, read)) == {4}
    tokens[place] += 1
    after = IndexedDataset(write(tmp_path / "b", [[tokens]]))
    assert before.digest == after.digest and before.content_digest != after.content_digest
    shards = [TokenShards([nanogpt(tmp_path / f"{i}.bin", t)]) for i, t in enumerate((np.arange(16_000), tokens))]
    assert shards[0].content_digest != shards[1].content_digest and shards[0].digest == shards[1].digest


@pytest.mark.parametrize("ask", [(3,), (-1,), (0, 0, 4), (0, -1), (0, 4), (0, 2, -1)])
def test_there_is_nothing_beyond_a_sequence(whole, ask):
    with pytest.raises(IndexError):
        IndexedDataset(whole).window(*ask)


def test_the_type_goes_by_the_vocabulary():
    assert [token_dtype(n).name for n in (257, 50257, 65499, 65500, 10**6)] == [*["uint16"] * 3, *["int32"] * 2]


def test_datasets_of_several_types_are_not_merged(whole, tmp_path):
    with pytest.raises(UserError, match="holds tokens of type int32, the datasets before it uint16"):
        merge([whole, write(tmp_path / "wide", [[[1]]], np.int32)], tmp_path / "mixed")
    with pytest.raises(UserError, match="at least one"):
        merge([], tmp_path / "nothing")
    assert not list(tmp_path.glob("*mixed*")) and not list(tmp_path.glob("*nothing*"))


def patch(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def cut(path, size):
    os.truncate(path, size)


BREAK = {
    "magic": (lambda b, i: patch(i, 0, b"TNTIDX"), r"byte 0: it begins with b'TNTIDX"),
    "version": (lambda b, i: patch(i, 9, b"\x02"), r"byte 9: its version is 2, not 1"),
    "float": (lambda b, i: patch(i, 17, b"\x07"), r"byte 17: the code 7"),
    "count": (lambda b, i: patch(i, 18, b"\x04"), r"byte 94: it ends there, but 4 sequences and 3 .* take 106 bytes"),
    "empty index": (lambda b, i: cut(i, 0), r"byte 0: it ends inside its header"),
    "header": (lambda b, i: cut(i, 33), r"byte 33: it ends inside its header of 34 bytes"),
    "short index": (lambda b, i: cut(i, 93), r"byte 93: it ends there"),
    "long index": (lambda b, i: patch(i, 94, b"\x00"), r"byte 94: it goes on there"),
    "length": (lambda b, i: patch(i, 38, struct.pack("<i", -1)), r"byte 38: sequence 1 would have -1 tokens"),
    "other length": (lambda b, i: patch(i, 34, b"\x02"), r"byte 54: sequence 1 would begin at byte 6 .* ends at 4\)"),
    "last length": (lambda b, i: patch(i, 42, b"\x06"), r"has 18 bytes, but by .* ends at byte 20"),
    "offset": (lambda b, i: patch(i, 62, b"\x06"), r"byte 62: sequence 2 would begin at byte 6 .* ends at 8\)"),
    "document 0": (lambda b, i: patch(i, 70, b"\x01"), r"byte 70: its document index does not begin with 0"),
    "documents": (lambda b, i: patch(i, 78, b"\x04"), r"byte 86: bound 2 of its documents is 3, below"),
    "last document": (lambda b, i: patch(i, 86, b"\x02"), r"byte 86: its last document ends at 2 of 3 sequences"),
    "truncated": (lambda b, i: cut(b, 17), r"bin has 17 bytes, but by .*idx its last sequence ends at byte 18"),
    "longer": (lambda b, i: patch(b, 18, b"\x00\x00"), r"bin has 20 bytes, but by"),
    "empty tokens": (lambda b, i: cut(b, 0), r"bin has 0 bytes, but by"),
    "no tokens": (lambda b, i: b.unlink(), r"bin cannot be read \(No such file"),
    "no index": (lambda b, i: i.unlink(), r"idx cannot be read \(No such file"),
    "folder": (lambda b, i: (b.unlink(), b.mkdir()), r"bin cannot be read \(not a regular file"),
}


@pytest.mark.parametrize("name", BREAK)
def test_what_is_not_whole_is_refused(whole, name):
    damage, sentence = BREAK[name]
    damage(bin_path(whole), idx_path(whole))
    with pytest.raises(UserError, match=sentence) as error:
        IndexedDataset(whole)
    assert "\n" not in str(error.value) and re.search(r"; (one of them|copy|give)", str(error.value))


def test_the_index_of_another_dataset_is_refused(whole, tmp_path):
    other = write(tmp_path / "other", [[[1, 2], [3]], [[4, 5, 6]]])
    idx_path(other).rename(idx_path(whole))
    with pytest.raises(
        UserError, match=r"has 18 bytes, but by .* ends at byte 12; one of them is truncated or of another"
    ):
        IndexedDataset(whole)


def test_every_cut_is_noticed(whole):
    data = idx_path(whole).read_bytes()
    for size in range(len(data)):
        idx_path(whole).write_bytes(data[:size])
        with pytest.raises(UserError, match=f"byte {size}: it ends"):
            IndexedDataset(whole)


def test_an_error_leaves_the_former_dataset(whole, tmp_path):
    before = [p.read_bytes() for p in sorted(tmp_path.iterdir())]
    with pytest.raises(RuntimeError, match="midway"), IndexedWriter(whole, np.uint16) as writer:
        writer.append([1])
        raise RuntimeError("midway")
    for wrong, type_ in ([65536], "int64"), ([-1], "int64"), ([1.5], "float64"):
        with pytest.raises(UserError, match=rf"\({type_}\) do not fit"), IndexedWriter(whole, np.uint16) as writer:
            writer.append(wrong)
    assert [p.read_bytes() for p in sorted(tmp_path.iterdir())] == before
    write(whole, [[[7]]])  # and a new one takes its place
    same(IndexedDataset(whole), [[[7]]])


def test_what_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), IndexedWriter(tmp_path / "file" / "a", np.uint16):
        pass
    with pytest.raises(UserError, match="cannot be stored as float32"):
        IndexedWriter(tmp_path / "a", np.float32)


@pytest.mark.parametrize("error, advice", [
    (OSError(28, "No space left on device"), "free space there"),
    (OSError(30, "Read-only file system"), "choose a place that can be written"),
    (OSError(95, "Operation not supported"), "choose another folder")
])  # fmt: skip
def test_a_disk_that_cannot_be_written_is_told(tmp_path, monkeypatch, error, advice):
    def full(_):
        raise error

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=rf"cannot be written \({error.strerror}\); {advice}$"):
        write(tmp_path / "a", [[[1]]])
    assert not list(tmp_path.iterdir())


def test_a_sealed_dataset_is_on_the_disk_and_only_renamed(whole, tmp_path, monkeypatch):
    with IndexedWriter(whole, np.uint16) as writer:
        writer.append([7])
        writer.seal()
        same(IndexedDataset(whole), [[[1, 2, 3], [4]], [[5, 6, 7, 8, 9]]])
        monkeypatch.setattr(Path, "open", lambda *_, **__: pytest.fail("written after it was sealed"))
    monkeypatch.undo()
    same(IndexedDataset(whole), [[[7]]])
    with pytest.raises(RuntimeError, match="late"), IndexedWriter(whole, np.uint16) as writer:
        writer.seal()
        raise RuntimeError("late")
    same(IndexedDataset(whole), [[[7]]])
    assert len(list(tmp_path.iterdir())) == 2


def llmc(path, tokens, magic=20240520, version=1, count=None, dtype="<u2"):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.array(tokens, dtype).tobytes())
    return path


def llama3(path, tokens):
    return llmc(path, tokens, 20240801, 7, dtype="<u4")


def saved(path, tokens, dtype):
    with open(path, "wb") as file:  # numpy.save itself would add a suffix
        np.save(file, np.array(tokens, dtype))
    return path


def nanogpt(path, tokens):
    path.write_bytes(np.array(tokens, "<u2").tobytes())
    return path


def test_shards_are_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr(token_shards, "SCAN", 3)
    first = llmc(tmp_path / "a.bin", [99, 1, 2, 99, 99, 3])
    second = nanogpt(tmp_path / "b.bin", [4, 99, 5, 6, 99, 7])
    shards = TokenShards([first, second], eot=99)
    sequences = [[99, 1, 2], [99], [99, 3], [4, 99], [5, 6, 99], [7]]
    assert [shards.window(i).tolist() for i in range(len(shards))] == sequences
    assert shards.lengths.tolist() == list(map(len, sequences)) and shards.lengths.dtype == np.int32
    assert shards.num_tokens == 12 and shards.window(4, 1, 1).tolist() == [6]
    chosen, begins, counts = np.array([4, 0, 5, 0, 3]), np.array([1, 0, 0, 2, 0]), np.array([2, 2, 1, 1, 0])
    assert shards.read(chosen, begins, counts).tolist() == [6, 99, 99, 1, 7, 2]
    whole = TokenShards([first, second])
    assert whole.lengths.tolist() == [6, 6] and whole.digest != shards.digest
    one = TokenShards([second], 99)
    assert one.read(np.array([2, 0]), np.array([0, 1]), np.array([1, 1])).tolist() == [7, 99]
    assert one.digest == TokenShards([second], 99).digest


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda p: llmc(p, [1, 2, 3], count=4), "has 1030 bytes, but by its header .* ends at byte 1032"),
    (lambda p: llmc(p, [1, 2, 3], count=2), "has 1030 bytes, but by its header .* ends at byte 1028"),
    (lambda p: llmc(p, [1], version=2), "version 2 at byte 4"),
    (lambda p: llmc(p, [1, 2], magic=20240801, version=7), "by its header .* ends at byte 1032"),
    (lambda p: llmc(p, [1, 2], magic=20240801, dtype="<u4"), "version 1 at byte 4, dtgpt reads 7"),
    (lambda p: saved(p, [0.5, 1], "<f4"), r"float32 in the shape \(2,\), and tokens are whole"),
    (lambda p: saved(p, [[1, 2]], "<u2"), r"uint16 in the shape \(1, 2\), and tokens are whole"),
    (lambda p: p.write_bytes(b"\x93NUMPY\1\0v\0{'descr': ["), "is damaged"),
    (lambda p: p.write_bytes(saved(p, [1, 2], "<u4").read_bytes()[:-1]), "is damaged"),
    (lambda p: p.write_bytes(struct.pack("<i", 20240520)), "ends at byte 4, inside its header"),
    (lambda p: p.write_bytes(b"\x01\x00\x02"), "has 3 bytes, which are not uint16 tokens .byte 2"),
    (lambda p: p.write_bytes(b""), "has 0 bytes, which are not uint16 tokens"),
    (lambda p: None, "cannot be read .No such file")
])  # fmt: skip
def test_shards_that_are_not_whole_are_refused(tmp_path, make, sentence):
    make(tmp_path / "a.bin")
    with pytest.raises(UserError, match=sentence):
        TokenShards([tmp_path / "a.bin"])


def test_shards_of_llama_3_have_a_begin_of_text_before_each_document(tmp_path):
    tokens = [128000, 5, 70000, 128000, 128001, 9]
    for eot, begin, lengths in ((128001, 128000, [3, 3]), (128001, None, [4, 2]), (None, 128000, [6])):
        shards = TokenShards([llama3(tmp_path / "a.bin", tokens)], eot, begin)
        assert shards.lengths.tolist() == lengths and shards.dtype == np.uint32
        assert np.concatenate([shards.window(i) for i in range(len(shards))]).tolist() == tokens
    mixed = TokenShards([llama3(tmp_path / "a.bin", tokens), nanogpt(tmp_path / "b.bin", [7, 128])], 9)
    assert mixed.window(0).tolist() == tokens[:-1] and mixed.window(2).tolist() == [7, 128]
    assert mixed.dtype == np.int64


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i8", ">u2", "u1"])
@pytest.mark.parametrize("name", ["a.bin", "a.npy"])
def test_what_numpy_saved_has_the_type_of_its_header_by_any_name(tmp_path, name, dtype):
    shards = TokenShards([saved(tmp_path / name, [1, 2, 9, 3], dtype)], 9)
    assert [shards.window(i).tolist() for i in range(2)] == [[1, 2, 9], [3]]


def test_tokens_of_another_type_than_uint16_are_refused(tmp_path):
    """Those of tokenizers with few and many tokens."""
    draw, path = np.random.default_rng(0), tmp_path / "a.bin"
    for high in (100, 50257, 100278, 128256, 262144):
        tokens = draw.integers(1, high, 4000)
        for dtype in ("<u4", "<i8", ">u4"):
            for padding in (0, 20_000):
                path.write_bytes(np.r_[[0] * padding, tokens].astype(dtype).tobytes())
                with pytest.raises(UserError, match=rf"every second 16-bit word, .*n.memmap\('{path}', '<u4', 'r'\)"):
                    TokenShards([path])
    np.savez(path.with_suffix(".npz"), tokens)
    path.with_suffix(".npz").rename(path)
    with pytest.raises(
        UserError, match=r"is a zip archive, as numpy\.savez and torch\.save write; save its tokens with"
    ):
        TokenShards([path])
    path.write_bytes(np.arange(100, dtype="<u4").tobytes())
    with pytest.raises(UserError, match="every second 16-bit word"):
        TokenShards([path])
    for high in (2, 20, 65, 257, 50257):
        for count in (10, 100, 10_000):
            tokens = draw.integers(0, high, count)
            assert TokenShards([nanogpt(path, tokens)]).window(0).tolist() == tokens.tolist()
    path = path.rename(tmp_path / "a.npy")
    with pytest.raises(UserError, match=r"does not begin as what numpy.save writes.*'<u4 or <u2', 'r'\)"):
        TokenShards([path])


def test_no_shards_are_refused():
    with pytest.raises(UserError, match="at least one"):
        TokenShards([])


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_files_that_shrink_while_they_are_read_are_named(tmp_path, suffix, keep):
    """Truncated in place, as by a copy over them: neither a signal nor zeros."""
    dataset = IndexedDataset(write(tmp_path / "a", [[np.arange(1, 7)] * 3000]))
    path = tmp_path / f"a{suffix}"
    size = path.stat().st_size
    os.truncate(path, int(keep * size))
    last = np.array([2999])
    with pytest.raises(
        UserError, match=rf"a{suffix} had {size} bytes when it was opened, and ends at byte \d+ now: .*"
    ):
        if suffix == ".bin":
            dataset.read(last, last * 0, last * 0 + 6)
        else:
            dataset.documents[-1]


def test_a_shard_that_shrinks_while_it_is_read_is_named(tmp_path):
    shards = TokenShards([nanogpt(tmp_path / "a.bin", np.arange(6000)), nanogpt(tmp_path / "b.bin", np.arange(6000))])
    os.truncate(tmp_path / "b.bin", 11_998)
    assert shards.window(1, 0, 5999)[-1] == 5998  # what is left can be read
    with pytest.raises(UserError, match=r"b.bin had 12000 bytes when it was opened, and ends at byte 11998 now"):
        shards.window(1)


def test_a_pipe_is_no_dataset(tmp_path):
    """And does not wait for a writer."""
    os.mkfifo(tmp_path / "a.bin")
    with pytest.raises(UserError, match=r"a.bin cannot be read \(not a regular file\)"):
        TokenShards([tmp_path / "a.bin"])

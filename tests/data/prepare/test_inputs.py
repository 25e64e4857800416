"""Documents from files and standard input: formats, compression, order, and lines that are none."""

import bz2
import gzip
import io
import json
import lzma
import os
import struct
import sys
import threading
import tracemalloc

import pytest

from dtgpt.data.prepare import compressed, documents, inputs
from dtgpt.data.prepare.compressed import decompressed
from dtgpt.data.prepare.documents import InputFile
from dtgpt.data.prepare.inputs import find_sources, read_blocks, total_bytes
from dtgpt.data.text import Broken
from dtgpt.util.errors import UserError

TEXTS = ["Grüße, 世界! 🎈\u2028 end", "two\nlines\r\n", "", '"quoted", a', "<|endoftext|>"]
PACK = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, "": bytes}


def json_lines(texts, **fields) -> bytes:
    return "".join(json.dumps({"text": text, **fields}, ensure_ascii=False) + "\n" for text in texts).encode()


def read(patterns, keys=("text",), **options):
    """(documents, broken lines)"""
    sources = find_sources([str(p) for p in patterns], **options)
    found = [item for block in read_blocks(sources, keys) for item in block.documents(keys)]
    return [d for d in found if not isinstance(d, Broken)], [str(b) for b in found if isinstance(b, Broken)]


def texts_of(patterns, **options):
    found, broken = read(patterns, **options)
    assert not broken
    return [piece for document in found for piece in document["text"]]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few bytes, so that every border is met."""
    for module in (documents, inputs):
        monkeypatch.setattr(module, "BLOCK", 7)
    monkeypatch.setattr("dtgpt.data.prepare.compressed.PIECE", 5)


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize("packed", PACK)
def test_json_lines_compressed_or_not(tmp_path, suffix, packed, small_blocks):
    path = tmp_path / f"a{suffix}{packed}"
    path.write_bytes(PACK[packed](json_lines(TEXTS)))
    assert texts_of([path]) == TEXTS


def test_zstd_and_what_follows_its_first_frame(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    frames = [zstandard.ZstdCompressor().compress(json_lines([text])) for text in TEXTS]
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"".join(frames))
    assert texts_of([path]) == TEXTS
    path.write_bytes(b"".join(frames)[:-3])
    with pytest.raises(UserError, match=r"a\.jsonl\.zst is damaged or was cut off"):
        texts_of([path])


def zstd_frame(blocks: bytes, window_log: int = 17, content: int | None = None, single: bool = False) -> bytes:
    """A frame of zstd by its own rules, which may claim any window and any size of its content (RFC 8878)."""
    flags = 0b11100000 if single else 0 if content is None else 0b11000000
    window = b"" if single else bytes([(window_log - 10) << 3])
    return b"\x28\xb5\x2f\xfd" + bytes([flags]) + window + struct.pack("<Q", content or 0)[: 8 * bool(flags)] + blocks


def zstd_run(size: int, last: bool = False) -> bytes:
    """A block of one byte, `size` times."""
    return struct.pack("<I", size << 3 | 0b10 | last)[:3] + b"a"


LAST = struct.pack("<I", 1)[:3]  # an empty block that ends a frame
SKIPPED = b"\x50\x2a\x4d\x18"
BOMBS = {
    "window of 2 TiB": (zstd_frame(zstd_run(100, True), 41), "asks for more memory than is given"),
    "window of 256 MiB": (zstd_frame(zstd_run(100, True), 28), "asks for more memory than is given"),
    "content of 4 EiB in one piece": (zstd_frame(zstd_run(9, True), content=1 << 62, single=True), "asks for more mem"),
    "content of 4 EiB": (zstd_frame(zstd_run(9, True), content=1 << 62), "is damaged"),
    "content of 5 bytes": (zstd_frame(zstd_run(9, True), content=5), "is damaged"),
    "skipped 2 GiB": (SKIPPED + struct.pack("<I", 1 << 31) + b"x" * 9, "is damaged or was cut off"),
    "256 MiB of 8 kB": (zstd_frame(zstd_run(1 << 17) * 2048 + LAST), 1 << 28),
    "empty frames": (zstd_frame(LAST, 27) * 50_000, 0),
    "skipped frames": ((SKIPPED + bytes(4)) * 50_000, 0),
    "frames of a byte": (zstd_frame(zstd_run(1, True), 27) * 20_000, 20_000),
}


@pytest.mark.slow(1)
@pytest.mark.parametrize("content, result", BOMBS.values(), ids=BOMBS)
def test_zstd_that_claims_or_becomes_much_takes_little_memory(content, result):
    pytest.importorskip("zstandard")
    pieces = decompressed(io.BufferedReader(io.BytesIO(content)), "b.zst")
    tracemalloc.start()
    try:
        if isinstance(result, str):
            with pytest.raises(UserError, match=f"^b.zst {result}") as error:
                list(pieces)
            assert "\n" not in str(error.value)
        else:
            assert sum(map(len, pieces)) == result
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


def test_xz_that_asks_for_much_memory_is_refused(monkeypatch):
    monkeypatch.setattr(compressed, "LARGEST_WINDOW", 1 << 20)
    pieces = decompressed(io.BufferedReader(io.BytesIO(lzma.compress(b"x" * 99, preset=9))), "b.xz")
    with pytest.raises(UserError, match=r"^b\.xz asks for more memory than is given to a file"):
        list(pieces)


def test_without_zstandard_the_remedy_is_told_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd....")
    with pytest.raises(UserError, match="needs the package zstandard, which is missing; run pip install"):
        find_sources([str(tmp_path / "a.jsonl.zst")])


@pytest.mark.parametrize("packed", [".gz", ".xz", ".bz2"])
@pytest.mark.parametrize("damage", ["cut", "noise"])
def test_damaged_archives_are_refused(tmp_path, packed, damage):
    data = PACK[packed](json_lines(TEXTS * 50))
    path = tmp_path / f"a.jsonl{packed}"
    path.write_bytes(data[: len(data) // 2] if damage == "cut" else data[:20] + b"\x00\xff" * 8 + data[36:])
    with pytest.raises(UserError, match=f"a.jsonl{packed} (is damaged|cannot be read)"):
        texts_of([path])


def test_a_name_that_hides_the_compression_does_not_matter(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(json_lines(TEXTS)))
    (tmp_path / "b.jsonl.gz").write_bytes(json_lines(["plain"]))
    assert texts_of([tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]) == [*TEXTS, "plain"]


def test_lines_may_end_as_they_like(tmp_path, small_blocks):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  {"text": "b"}  \n\r\n{"text": "c"}')
    assert texts_of([path]) == ["a", "b", "c"]


@pytest.mark.parametrize("block, piece", [(1, 1), (7, 5), (1 << 20, 1 << 18)])
def test_lines_end_where_pythons_text_files_end_them(tmp_path, monkeypatch, block, piece):
    monkeypatch.setattr("dtgpt.data.prepare.documents.BLOCK", block)
    monkeypatch.setattr("dtgpt.data.prepare.compressed.PIECE", piece)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\r{"text": "b"}\r\n\r\r\n{"text": \r\n\n{"text": "c\xc2\x85\x1c"}\r')
    with path.open(encoding="utf-8") as file:
        number = next(i for i, line in enumerate(file, 1) if line == '{"text": \n')
    (first, second), broken = read([path])[0], read([path])[1]
    assert [d["text"] for d in (first, second)] == [["a"], ["b"]]
    assert [line.split(":")[0] for line in broken] == [f"{path}, line {number}", f"{path}, line {number + 2}"]
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\rtwo\r\nthree\xc2\x85\xe2\x80\xa8")
    assert texts_of([path], txt="line") == ["one", "two", "three\x85\u2028"]


def test_suffixes_may_be_capitals(tmp_path):
    (tmp_path / "A.JSONL.GZ").write_bytes(gzip.compress(json_lines(["x"])))
    assert texts_of([tmp_path / "A.JSONL.GZ"]) == ["x"]


def test_one_json_document_on_many_lines_is_called_so(tmp_path):
    path = tmp_path / "a.json"
    for value in ([{"text": "a"}], {"text": "a"}):
        path.write_text(json.dumps(value, indent=1))
        assert "one JSON document on several lines; dtgpt reads one object a line" in read([path])[1][0]


def test_several_keys_and_lists_of_texts(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": ["x", "", "y"], "b": "z"}\n')
    assert read([path], ("a", "b"))[0] == [{"a": ["x", "", "y"], "b": ["z"]}]


def test_broken_lines_are_named_with_file_and_number(tmp_path, small_blocks):
    path = tmp_path / "a.jsonl"
    lines = [
        b'{"text": "good"}', b'{"text": ', b'["text"]', b'{"content": "x"}', b'{"text": 7}', b'{"text": ["a", null]}',
        b'{"text": "caf\xe9"}', b"", b"[" * 100_000, b'{"text": ' + b"9" * 5000 + b"}", b'{"text": "last"}',
    ]  # fmt: skip
    path.write_bytes(b"\n".join(lines))
    found, broken = read([path])
    assert [d["text"] for d in found] == [["good"], ["last"]]
    told = ["not JSON", "a JSON array;", "no key 'text'", "neither text", "neither text", "not UTF-8 (byte 14",
            "not JSON", "not JSON"]  # fmt: skip
    for line, number, words in zip(broken, [2, 3, 4, 5, 6, 7, 9, 10], told, strict=True):
        assert line.startswith(f"{path}, line {number}: ") and words in line


def test_a_line_whose_values_take_far_more_memory_than_the_line_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MOST_NESTED", 100)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "' + "[" * 90 + '"}\n{"text": "b", "x": [' + ",".join(["[]"] * 100) + "]}\n")
    found, broken = read([path])
    assert found == [{"text": ["[" * 90]}]
    assert broken == [
        f"{path}, line 2: more than 100 lists and objects, which take all memory; cut it into several lines"
    ]


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a \\ud83d b \\ud83c\\udf88"}\n')
    assert texts_of([path]) == ["a \ufffd b 🎈"]


def test_a_text_is_one_document_or_one_a_line(tmp_path, small_blocks):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\n\n zwei \nünf".encode())
    assert texts_of([path]) == ["one\r\n\n zwei \nünf"]
    assert texts_of([path], txt="line") == ["one", " zwei ", "ünf"]
    path.write_bytes(b"ok\ncaf\xe9\n")
    assert read([path])[1] == [f"{path}, line 2: not UTF-8 (byte 7 of the file)"]
    assert read([path], txt="line") == ([{"text": ["ok"]}], [f"{path}, line 2: not UTF-8 (byte 4 of the line)"])


def test_files_come_in_the_order_given_and_globs_sorted(tmp_path, small_blocks):
    for name in ("c.txt", "a.txt", "b.jsonl", "d.jsonl"):
        letter = name[:1]
        (tmp_path / name).write_text(letter if name.endswith("txt") else json.dumps({"text": letter}))
    assert texts_of([tmp_path / "d.jsonl", tmp_path / "*.txt", tmp_path / "b.jsonl"]) == ["d", "a", "c", "b"]
    assert total_bytes(find_sources([str(tmp_path / "*.txt")])) == 2


def test_blocks_tell_how_far_they_are(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["x" * 1000] * 3000))
    (tmp_path / "b.txt").write_bytes(b"text")
    sources = find_sources([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")])
    blocks = list(read_blocks(sources, ("text",)))
    positions = [block.position for block in blocks]
    assert positions == sorted(positions) and positions[-1] == total_bytes(sources) and len(blocks) > 2
    assert all(len(block.data) < 2 << 20 for block in blocks[:-1])


def test_standard_input_and_pipes(tmp_path, monkeypatch):
    class Stdin:
        buffer = io.BufferedReader(io.BytesIO(gzip.compress(json_lines(TEXTS))))

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert texts_of(["-"]) == TEXTS
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=lambda: pipe.write_bytes(json_lines(TEXTS)), daemon=True).start()
    assert texts_of([pipe]) == TEXTS
    with pytest.raises(UserError, match="given twice"):
        find_sources(["-", "-"])


@pytest.mark.parametrize("name, words", [
    ("missing.jsonl", ["missing.jsonl cannot be read", "No such file"]),
    ("none*.jsonl", ["no file matches", "none*.jsonl"]), ("folder", ["folder is a folder", "*.jsonl"]),
    ("a.pdf", ["a.pdf", ".jsonl", "--input-format"])
])  # fmt: skip
def test_inputs_that_cannot_be_read_are_refused_at_once(tmp_path, name, words):
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.pdf").write_bytes(b"x")
    with pytest.raises(UserError) as error:
        find_sources([str(tmp_path / name)])
    assert all(word in str(error.value) for word in words)
    assert find_sources([str(tmp_path / "a.pdf")], kind="jsonl") == [InputFile(str(tmp_path / "a.pdf"), "jsonl")]


def test_a_file_that_may_not_be_read_is_refused_at_once(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("{}")

    def refuse(*_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", refuse)  # root may read everything
    with pytest.raises(UserError, match=r"a\.jsonl cannot be read: Permission denied"):
        find_sources([str(path)])


def skipped(number=0, content=b"abcd"):
    """A frame of zstd that readers pass over, as pzstd puts one before each frame."""
    return (0x184D2A50 + number).to_bytes(4, "little") + len(content).to_bytes(4, "little") + content


@pytest.mark.parametrize("number", [0, 7, 15])
def test_a_file_of_pzstd_is_read(tmp_path, number, small_blocks):
    zstandard = pytest.importorskip("zstandard")
    frames = [zstandard.ZstdCompressor().compress(json_lines([text])) for text in TEXTS]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(skipped(number) + frame for frame in frames) + skipped(number, b""))
    assert texts_of([path]) == TEXTS
    path.write_bytes(skipped(number))
    assert texts_of([path]) == []
    path.write_bytes(skipped(number) + b"what is no frame")
    with pytest.raises(UserError, match="is damaged or was cut off"):
        texts_of([path])


@pytest.mark.parametrize("packed", [".gz", ".xz", ".bz2"])
def test_all_streams_of_a_file_are_read_or_it_is_refused(tmp_path, packed, small_blocks):
    one, two = (PACK[packed](json_lines(texts)) for texts in (TEXTS[:2], TEXTS[2:]))
    path = tmp_path / "a.jsonl"
    for content in (one + two, one + b"\0" * 8 + two, one + two + b"\0" * 4):
        path.write_bytes(content)
        assert texts_of([path]) == TEXTS
    for content in (one + two[:-3], one + b"garbage" + two, one + b"x" + two[1:], one + two + b"junk"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"a\.jsonl is damaged"):
            texts_of([path])


@pytest.mark.parametrize("content, words", [
    (b"\x04\x22\x4d\x18....", "lz4"), (b"PK\x03\x04....", "zip"), (b"7z\xbc\xaf\x27\x1c", "7z"), (b"LZIP\x01", "lzip"),
    (lzma.compress(json_lines(TEXTS), lzma.FORMAT_ALONE), "xz -d"), (b"\x1f\x9d\x90", "gzip -d"),
    (json_lines(TEXTS).decode().encode("utf-16"), "UTF-16"), (b"a.jsonl" + b"\0" * 250 + b"ustar\x0000", "tar -x"),
    (gzip.compress(b"a.jsonl" + b"\0" * 250 + b"ustar\x0000", mtime=0), "tar -x"), (b"PAR1\x15\x04", "Parquet"),
    (gzip.compress(bz2.compress(json_lines(TEXTS)), mtime=0), "compressed twice"),
], ids=lambda value: value if isinstance(value, str) else "bytes")  # fmt: skip
def test_formats_that_are_not_read_are_named_and_no_document_vanishes(tmp_path, content, words):
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS))
    (tmp_path / "b.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=rf"b\.jsonl is .*{words}"):
        texts_of([tmp_path / "*.jsonl"])


def test_a_text_that_begins_like_an_archive_is_a_text(tmp_path):
    for i, text in enumerate(("BZh is how bzip2 begins", "PK", "LZIP", "PAR1", "Rar!")):
        (tmp_path / f"{i}.txt").write_text(text)
        assert texts_of([tmp_path / f"{i}.txt"]) == [text]


def bomb(packed, path, size, fill=b"\n"):
    """`size` bytes of one kind in a small file."""
    if packed == ".zst":
        maker = pytest.importorskip("zstandard").ZstdCompressor(level=3).compressobj()
    else:
        import zlib

        new = {".xz": lambda: lzma.LZMACompressor(preset=0), ".bz2": bz2.BZ2Compressor}
        maker = new.get(packed, lambda: zlib.compressobj(1, zlib.DEFLATED, 31))()
    with path.open("wb") as file:
        for _ in range(size >> 20):
            file.write(maker.compress(fill * (1 << 20)))
        file.write(maker.flush())
    return path


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    "packed, size, most", [(".zst", 400, 200), (".gz", 128, 96), (".xz", 128, 96), (".bz2", 128, 96)]
)
def test_a_small_file_does_not_fill_the_memory(tmp_path, packed, size, most):
    """size, most: MiB of the file that is read, and of memory."""
    import tracemalloc

    path = bomb(packed, tmp_path / f"a.jsonl{packed}", size << 20)
    tracemalloc.start()
    try:
        assert texts_of([path]) == [] and tracemalloc.get_traced_memory()[1] < most << 20
    finally:
        tracemalloc.stop()


def test_a_line_or_text_beyond_all_bounds_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LONGEST", 3 << 20)
    monkeypatch.setattr("dtgpt.data.text.LONGEST_TEXT", 3 << 20)
    with pytest.raises(UserError, match=r"a\.jsonl\.gz, line 1 or later: longer than 3 MiB"):
        texts_of([bomb(".gz", tmp_path / "a.jsonl.gz", 8 << 20, b"a")])
    with pytest.raises(UserError, match=r"a\.txt\.gz is longer than 3 MiB, too long for one document; .*--txt line"):
        texts_of([bomb(".gz", tmp_path / "a.txt.gz", 8 << 20)])

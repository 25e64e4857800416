"""No header of a file is believed unchecked, and a file that changed is told."""

import json
import math
import random

import pytest
import torch

from dtgpt.checkpoint.shard_file import (
    PIECES,
    Damaged,
    Piece,
    Written,
    copy_overlap,
    read_header,
    write_file,
)
from dtgpt.checkpoint.verification.verify import LARGEST_HEADER, find_damage
from dtgpt.parallel.layout import slices


def write(path, tensors):
    """`tensors`: (name, whole, part)."""
    pieces = [Piece(n, tuple(w.shape), tuple(r.start for r in p), tuple(map(len, p))) for n, w, p in tensors]
    data = [w[slices(p)].flatten() for _, w, p in tensors]
    return write_file(path, pieces, torch.cat(data) if data else torch.empty(0))


def with_header(path, change, data=44):
    table = {
        "__metadata__": {"where": {"w": {"shape": [4, 3], "offset": [1, 0]}, "v": {"shape": [5], "offset": [0]}}},
        "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "v": {"dtype": "F32", "shape": [5], "data_offsets": [24, 44]},
    }
    where = table["__metadata__"].pop("where")
    changed = change(table, where)
    table = table if changed is None else changed
    if isinstance(table, dict) and isinstance(table.get("__metadata__"), dict):
        table["__metadata__"].setdefault(PIECES, json.dumps(where))
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\x3f" * data)


def entry(name, **values):
    return lambda table, where: table[name].update(values)


def place(name, **values):
    return lambda table, where: where[name].update(values)


def metadata(text):
    return lambda table, where: table["__metadata__"].update({PIECES: text})


def drop(name):
    return lambda table, where: table.pop(name) and None


HUGE = 2**70
LIES = {
    "not a dict": lambda t, w: b"[]",
    "a number": lambda t, w: b"7",
    "null": lambda t, w: b"null",
    "no json": lambda t, w: b"{",
    "no text": lambda t, w: b"\xff\xfe{}",
    "nothing": lambda t, w: b"",
    "deep nesting": lambda t, w: b'{"a":' + b"[" * 200_000,
    "a number of many digits": lambda t, w: b'{"a": ' + b"9" * 5000 + b"}",
    "deep nesting of the pieces": metadata("[" * 200_000),
    "pieces are a list": metadata('["w", "v"]'),
    "pieces are a string": metadata('"wv"'),
    "no metadata": drop("__metadata__"),
    "metadata is a list": lambda t, w: t.update(__metadata__=[]),
    "metadata of another library": lambda t, w: t.update(__metadata__={PIECES: "{}", "format": "pt"}),
    "a tensor that is nowhere": drop("v"),
    "a piece that is nowhere": lambda t, w: w.pop("v") and None,
    "no data": entry("w", data_offsets=[]),
    "three offsets": entry("w", data_offsets=[0, 24, 44]),
    "offsets are words": entry("w", data_offsets="ab"),
    "beyond the file": entry("v", data_offsets=[28, 48]),
    "far beyond the file": entry("v", data_offsets=[HUGE, HUGE + 20]),
    "before the data": entry("w", data_offsets=[-8, 16]),
    "backwards": entry("w", data_offsets=[24, 0]),
    "too short": entry("w", data_offsets=[0, 20]),
    "fractions": entry("w", data_offsets=[0.0, 24.0]),
    "true": entry("v", shape=[True], data_offsets=[24, 28]),
    "negative sizes": entry("w", shape=[-2, -3]),
    "sizes that are huge": entry("w", shape=[HUGE, HUGE]),
    "sizes that are huge, with nothing in it": entry("w", shape=[0, HUGE], data_offsets=[0, 0]),
    "sizes are words": entry("w", shape="23"),
    "sizes are a dict": entry("w", shape={}),
    "one dimension less": entry("w", shape=[6]),
    "another type": entry("w", dtype="I32"),
    "a type of other width": entry("w", dtype="F64"),
    "no type": lambda t, w: t["w"].pop("dtype") and None,
    "type is a list": entry("w", dtype=["F32"]),
    "an entry is a list": lambda t, w: t.update(w=[1]),
    "an entry is null": lambda t, w: t.update(w=None),
    "a place is null": lambda t, w: w.update(w=None),
    "more rows than the whole": place("w", offset=[3, 0]),
    "a whole that is smaller": place("w", shape=[2, 3]),
    "a negative place": place("w", offset=[-1, 0]),
    "a place far away": place("w", offset=[HUGE, 0]),
    "a place of one dimension": place("w", offset=[1]),
    "no place": place("w", offset=None),
    "no dimension": lambda t, w: (w["w"].update(shape=[], offset=[]), t["w"].update(shape=[]), None)[-1],
    "many dimensions": lambda t, w: (
        w["v"].update(shape=[5] + [1] * 40, offset=[0] * 41),
        t["v"].update(shape=[5] + [1] * 40),
        None,
    )[-1],
    "data of two tensors in one place": entry("v", data_offsets=[20, 40]),
}


def test_the_file_that_the_lies_change_is_good(tmp_path):
    with_header(tmp_path / "x", lambda table, where: None)
    assert [(p.name, p.size) for p, _ in read_header(tmp_path / "x")] == [("w", (2, 3)), ("v", (5,))]


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_with_its_path(tmp_path, lie):
    with_header(tmp_path / "x.safetensors", LIES[lie])
    with pytest.raises(Damaged, match=r"x\.safetensors is damaged \(.+\)") as error:
        read_header(tmp_path / "x.safetensors")
    assert str(error.value).startswith(f"{tmp_path / 'x.safetensors'} is damaged")


def test_a_length_that_the_file_does_not_have_or_a_file_that_was_cut_short_is_refused_before_it_is_read(tmp_path):
    with_header(tmp_path / "x", lambda table, where: None)
    content = (tmp_path / "x").read_bytes()
    lengths = 0, 1, 10**6, LARGEST_HEADER, LARGEST_HEADER + 1, 2**63, 2**64 - 1
    wrong = [length.to_bytes(8, "little") + content[8:] for length in lengths]
    for each in wrong + [content[:size] for size in range(0, len(content), 7)]:
        (tmp_path / "x").write_bytes(each)
        with pytest.raises(Damaged):
            read_header(tmp_path / "x")


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "nothing"):
        with pytest.raises(Damaged, match=path.name):
            read_header(path)
        assert path.name in str(find_damage(path, Written(0, "")))


def test_random_bytes_in_a_header_are_refused_or_make_pieces_within_the_file(tmp_path):
    """Never another error, and what is let through can be read."""
    path, refused = tmp_path / "x", 0
    with_header(path, lambda table, where: None)
    content = path.read_bytes()
    rng = random.Random(3)
    for _ in range(400):
        changed = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(content) - 44)] = (
                rng.choice(b'0123456789[]{},:" -"') if rng.random() < 0.8 else 255
            )
        path.write_bytes(changed)
        try:
            for piece, position in read_header(path):
                target = torch.zeros(piece.size)
                assert copy_overlap(path, piece, position, piece.part, target) == math.prod(piece.size)
                assert position + piece.num_bytes <= len(changed)
        except Damaged:
            refused += 1
    assert 200 < refused < 400


@pytest.mark.parametrize("change", ["flip", "cut", "more", "empty"])
def test_a_file_that_is_not_the_one_that_was_written_is_refused(tmp_path, change):
    path = tmp_path / "x"
    written = write(path, [("w", torch.rand(50, 3), (range(50), range(3)))])
    content = bytearray(path.read_bytes())
    content[-5] ^= change == "flip"
    ends = {"flip": content, "cut": content[:-1], "more": content + b"\0", "empty": b""}
    path.write_bytes(ends[change])
    words = "its sha256 is" if change == "flip" else "were written"
    assert words in str(find_damage(path, written))

"""Files of pieces: every cut is put together again, other readers read them, and no header is believed unchecked."""

import hashlib
import json
import math
import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from dtgpt.checkpoint.load import read_part
from dtgpt.checkpoint.shard_file import (
    PIECES,
    Damaged,
    Piece,
    Written,
    by_size,
    copy_overlap,
    read_header,
    write_file,
)
from dtgpt.checkpoint.verification.verify import LARGEST_HEADER, find_damage
from dtgpt.parallel.layout import chunk, slices
from dtgpt.util.storage import write_text

CASES = 40


def random_part(rng, shape):
    ends = [sorted(rng.sample(range(n + 1), 2)) if n else (0, 0) for n in shape]
    return tuple(range(a, b) for a, b in ends)


def random_cut(rng, shape):
    """Parts that cover a shape once: chunked like ranks do it, some of them empty."""
    counts = [rng.randint(1, 3) for _ in shape]
    parts = [()]
    for size, count in zip(shape, counts, strict=True):
        parts = [(*p, chunk(range(size), count, i)) for p in parts for i in range(count)]
    return parts


def random_tensors(rng):
    shapes = [tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 4))]
    return {f"a.{i}": torch.rand(shape) for i, shape in enumerate(shapes)}


def write(path, tensors):
    """`tensors`: (name, whole, part)."""
    pieces = [Piece(n, tuple(w.shape), tuple(r.start for r in p), tuple(map(len, p))) for n, w, p in tensors]
    data = [w[slices(p)].flatten() for _, w, p in tensors]
    return write_file(path, pieces, torch.cat(data) if data else torch.empty(0))


def scattered(rng, tensors, folder):
    """The files over which a random cut of each tensor is scattered, as ranks do it: each with a piece of some."""
    lists = [[] for _ in range(3**3)]
    for name, whole in tensors.items():
        parts = [part for part in random_cut(rng, whole.shape) if all(map(len, part))]
        for items, part in zip(rng.sample(lists, len(parts)), parts, strict=True):
            items.append((name, whole, part))
    lists = [items for items in lists if items]
    paths = [folder / f"{i}.safetensors" for i in range(len(lists))]
    written = [write(path, items) for path, items in zip(paths, lists, strict=True)]
    return paths, written


@pytest.mark.parametrize("seed", range(CASES))
def test_any_part_of_any_cut_is_read_element_by_element(tmp_path, seed):
    rng = random.Random(seed)
    tensors = random_tensors(rng)
    paths, written = scattered(rng, tensors, tmp_path)
    for path, expected in zip(paths, written, strict=True):
        assert find_damage(path, expected) is None
    pieces = [(path, piece, position) for path in paths for piece, position in read_header(path)]
    for name, whole in tensors.items():
        for part in [tuple(map(range, whole.shape)), *(random_part(rng, whole.shape) for _ in range(5))]:
            beyond = torch.full([len(r) + 2 for r in part], torch.nan)  # a view: not contiguous
            target = beyond[tuple(slice(1, -1) for _ in part)]
            counts = [copy_overlap(*place, part, target) for place in pieces if place[1].name == name]
            assert sum(counts) == target.numel()
            assert torch.equal(target, whole[slices(part)])
            assert beyond.isnan().sum() == beyond.numel() - target.numel()  # nothing beside it


def test_a_rank_that_holds_nothing_of_a_tensor_reads_nothing(tmp_path):
    """ZeRO over more replicas than a tensor has rows leaves some of them without any."""
    write(tmp_path / "x", [("w", torch.rand(1, 4), (range(1), range(4)))])
    ((piece, position),) = read_header(tmp_path / "x")
    checkpoint = SimpleNamespace(folder=tmp_path, pieces=lambda name: [("x", piece, position)])
    for part in ((range(1, 1), range(4)), (range(1), range(4))):
        target = torch.zeros([len(r) for r in part])
        read_part(checkpoint, "w", (1, 4), part, target)
        assert (target > 0).all()
    with pytest.raises(Damaged, match="0 elements are there, where 4 are needed"):
        read_part(SimpleNamespace(folder=tmp_path, pieces=lambda name: []), "w", (1, 4), part, target)


@pytest.mark.parametrize("seed", range(4))
def test_other_readers_of_safetensors_read_our_files(tmp_path, seed):
    rng = random.Random(seed)
    tensors = random_tensors(rng)
    items = [(name, whole, random_cut(rng, whole.shape)[0]) for name, whole in tensors.items()]
    written = write(tmp_path / "x.safetensors", items)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors)
        where = json.loads(file.metadata()[PIECES])
        for name, whole, part in items:
            assert torch.equal(file.get_tensor(name), whole[slices(part)])
            assert where[name] == {"shape": list(whole.shape), "offset": [r.start for r in part]}
    content = (tmp_path / "x.safetensors").read_bytes()
    assert written == Written(len(content), hashlib.sha256(content).hexdigest())
    assert (8 + int.from_bytes(content[:8], "little")) % 8 == 0  # the data is aligned


def test_numbers_of_any_bits_are_kept(tmp_path):
    bits = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 0x7F800001, 0x7FC00000], dtype=torch.int32)
    whole, target = bits.view(torch.float32), torch.zeros(7)
    write(tmp_path / "x", [("w", whole, (range(7),))])
    ((piece, position),) = read_header(tmp_path / "x")
    copy_overlap(tmp_path / "x", piece, position, (range(7),), target)
    assert torch.equal(target.view(torch.int32), bits)


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        write(tmp_path / "x", [("w", torch.rand(3), (range(3),))])
    assert (tmp_path / "x").read_text() == "mine"


def test_a_text_is_never_half_there(tmp_path, monkeypatch):
    write_text(tmp_path / "x", "before")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError):
        write_text(tmp_path / "x", "after")
    assert (tmp_path / "x").read_text() == "before"


def test_pieces_are_grouped_in_their_order_up_to_the_limit():
    for seed in range(30):
        rng = random.Random(seed)
        pieces = [Piece(str(i), (n,), (0,), (n,)) for i, n in enumerate(rng.choices(range(1, 9), k=rng.randint(0, 12)))]
        groups = list(by_size(pieces, 32))
        assert [p for group in groups for p in group] == pieces and all(groups)
        assert all(len(g) == 1 or sum(p.num_bytes for p in g) <= 32 for g in groups)
        assert all(sum(p.num_bytes for p in a) + b[0].num_bytes > 32 for a, b in pairwise(groups))


# Headers that lie. Each changes the header of a good file: tensors `w` [4, 3], of which rows 1 to 3, and `v` [5].
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

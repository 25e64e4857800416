"""Files of pieces: every cut is put together again, other readers read them, and no header is believed unchecked."""

import hashlib
import json
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
        assert hashlib.sha256(path.read_bytes()).hexdigest() == expected.sha256
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

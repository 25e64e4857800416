"""Digests: what they see, that they have no order, and that the kernel adds up the definition's."""

import itertools
import random

import pytest
import torch

from dtgpt.receipts.digest import Piece, bits_of, digest, hashes, key_of
from dtgpt.receipts.sums import Digests
from tests.support.interpreter import needs_triton, run_interpreted

WHOLE = (5, 4, 6)


def whole(label="weight/a", shape=WHOLE):
    return Piece(label, 0, 0, shape, tuple(map(range, shape)))


def by_hand(values, label) -> int:
    """Return a digest in Python's integers, from the words of the definition."""
    key, total, mask = key_of(label), 0, (1 << 32) - 1

    def mix(x, shifts, factors):
        for shift, factor in zip(shifts, (*factors, 1), strict=True):
            x = (x ^ (x >> shift)) * factor & mask
        return x

    for index, bits in enumerate(bits_of(values).tolist()):
        first = mix((bits + index * 0x9E3779B1 + key[0]) & mask, (16, 13, 16), (0x85EBCA6B, 0xC2B2AE35))
        second = first ^ (index * 0x27D4EB2F + key[1]) & mask
        total += first + (mix(second, (15, 12, 15), (0x2C1B3C6D, 0x297A2D39)) << 32)
    total &= (1 << 64) - 1
    return total - (1 << 64) if total >> 63 else total


def test_is_what_its_definition_says():
    values = torch.randn(WHOLE)
    assert digest(values, whole()).item() == by_hand(values, "weight/a")


def test_large_indices_count_with_all_their_bits():
    bits, far = torch.zeros(1, dtype=torch.int32), torch.tensor([3])
    assert hashes(bits, far, (1, 2)) != hashes(bits, far + (1 << 32), (1, 2))


def test_sees_a_bit_an_exchange_a_place_and_a_name():
    values = torch.randn(WHOLE)
    known = digest(values, whole())
    changed = values.clone()
    changed.view(torch.int32)[2, 1, 3] ^= 1
    exchanged = values.clone()
    exchanged[0, 0, 0], exchanged[4, 3, 5] = values[4, 3, 5], values[0, 0, 0]
    others = [digest(changed, whole()), digest(exchanged, whole()), digest(values.flip(0), whole())]
    assert all(other != known for other in others)
    assert digest(values, whole("weight/b")) != known
    assert digest(values * 0.0, whole()) == digest(values * -0.0, whole())


def test_no_two_elements_of_many_have_one_hash():
    bits, index = torch.zeros(1 << 18, dtype=torch.int32), torch.arange(1 << 18)
    assert len(hashes(bits, index, (3, 4)).unique()) == 1 << 18
    assert len(hashes(index.to(torch.int32), index[:1], (3, 4)).unique()) == 1 << 18


@pytest.mark.parametrize("seed", range(8))
def test_parts_add_up_however_a_plan_cuts(seed):
    draw, values = random.Random(seed), torch.randn(WHOLE)
    total = 0
    cuts = [sorted({0, size, draw.randint(0, size)}) for size in WHOLE]
    regions = [[range(a, b) for a, b in itertools.pairwise(cut)] for cut in cuts]
    for a in regions[0]:
        for b in regions[1]:
            for c in regions[2]:
                piece = Piece("weight/a", 0, 0, WHOLE, (a, b, c))
                own = values[a.start : a.stop, b.start : b.stop, c.start : c.stop]
                total = total + digest(own, piece)
                begins, length = piece.runs()
                runs = (begins[:, None] + torch.arange(length)).flatten()
                assert torch.equal(runs, piece.index(torch.device("cpu")))
    assert total == digest(values, whole())


def test_one_part_or_all():
    pieces = [Piece("weight/a", 0, 0, (3,), (range(3),)), Piece("weight/b", 2, 1, (2,), (range(2),))]
    tensors = [torch.randn(3), torch.randn(2).bfloat16()]
    own = Digests(pieces, 2, torch.device("cpu"))
    sums = torch.zeros(2, 3, dtype=torch.int64)
    own.add(tensors, torch.tensor(1), sums, torch.tensor(1))
    assert sums.tolist() == [[0, 0, 0], [0, 0, digest(tensors[1], pieces[1]).item()]]
    own.add(tensors, own.all, sums, torch.tensor(0))
    assert sums[0].tolist() == [digest(tensors[0], pieces[0]).item(), 0, digest(tensors[1], pieces[1]).item()]


INTERPRETED = """
import torch
from dtgpt.receipts.digest import Piece
from dtgpt.receipts.kernels import Table
from dtgpt.receipts.sums import Digests
device, pieces, tensors = torch.device("cpu"), [], []
regions = [(range(5), range(2, 5), range(6)), (range(1, 4), range(4), range(6)), (range(5), range(4), range(3, 5))]
for slot, region in enumerate(regions):
    pieces.append(Piece(f"weight/{slot}", slot, slot % 2, (5, 4, 6), region))
    tensors.append(torch.randn([len(r) for r in region]).to([torch.float32, torch.bfloat16, torch.float16][slot]))
pieces.append(Piece("weight/far", 3, 1, (1 << 40,), (range((1 << 32) - 9, (1 << 32) + 60),)))
tensors.append(torch.randn(69))
for part in (0, 1, 2):
    ours, theirs = torch.zeros(2, 3, 4, dtype=torch.int64)
    Digests(pieces, 2, device).add(tensors, torch.tensor(part), theirs, torch.tensor(1))
    Table(pieces, 2, device, chunk=16).add(tensors, torch.tensor(part), ours, torch.tensor(1))
    assert theirs.any() and torch.equal(ours, theirs), (part, ours, theirs)
"""


@pytest.mark.slow(6)
@needs_triton
def test_kernel_adds_up_what_the_definition_does():
    run_interpreted(INTERPRETED)


@pytest.mark.cuda
def test_kernel_adds_up_what_the_definition_does_on_a_gpu():
    device = torch.device("cuda")
    shapes = {"a": (1000, 513), "b": (77,), "c": (3, 5, 4099)}
    pieces = [Piece(n, i, i % 2, s, tuple(map(range, s))) for i, (n, s) in enumerate(shapes.items())]
    tensors = [torch.randn(shape, device=device) for shape in shapes.values()]
    tensors[1] = tensors[1].bfloat16()
    sums = torch.zeros(2, 3, dtype=torch.int64, device=device)
    own = Digests(pieces, 2, device)
    own.add(tensors, own.all, sums, torch.tensor(1, device=device))
    assert sums[1].tolist() == [digest(t.cpu(), p).item() for t, p in zip(tensors, pieces, strict=True)]
    assert not sums[0].any()

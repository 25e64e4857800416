import functools
import itertools
import math

import numpy as np
import pytest
import torch

from dtgpt.ops.random.dropout import attention_mask, keep_mask
from dtgpt.ops.random.philox import bits, fold, fold_words, normal, philox, root_key, row_chunks, uniform, uniform_rows
from tests.support.pairwise import each_pair

KEY = fold(root_key(1), "test")
WHOLE = (5, 6, 7, 30)


# Known answers that come with the authors' implementation (Random123, kat_vectors): counter, key, result.
@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, expected):
    words = philox(torch.tensor(key).unbind(), counter)
    assert [int(w) for w in words] == expected


@pytest.mark.parametrize("draw", [bits, uniform, normal])
@pytest.mark.parametrize("part", [
    (5, 6, 7, range(3, 11)), (range(2, 4), range(1, 6), range(6, 7), range(29, 30)),
    (range(0, 5, 2), range(1, 6, 3), range(0, 7, 6), range(1, 30, 5)), (range(4, 5), 6, 7, range(8, 16))
])  # fmt: skip
def test_a_part_equals_that_part_of_the_whole(draw, part):
    cut = tuple(slice(p.start, p.stop, p.step) if isinstance(p, range) else slice(None) for p in part)
    assert torch.equal(draw(KEY, part), draw(KEY, WHOLE)[cut])


def test_shards_of_every_dimension_and_count_join_to_the_whole():
    whole = bits(KEY, WHOLE)
    for dim, shards in itertools.product(range(4), (2, 3, 5)):
        size = WHOLE[dim]
        edges = [size * i // shards for i in range(shards + 1)]
        parts = [
            bits(KEY, [range(a, b) if d == dim else n for d, n in enumerate(WHOLE)])
            for a, b in itertools.pairwise(edges)
        ]
        assert torch.equal(torch.cat(parts, dim), whole)


def test_bits_do_not_depend_on_the_shape_of_the_global_tensor():
    assert torch.equal(bits(KEY, (9, 50))[:4, :13], bits(KEY, (4, 13)))


def test_an_empty_part_is_empty_and_a_backward_one_is_refused():
    assert bits(KEY, (3, range(4, 4))).shape == (3, 0)
    assert normal(KEY, (3, 0)).shape == (3, 0) and uniform(KEY, (0, 3)).shape == (0, 3)
    with pytest.raises(ValueError, match="backwards"):
        bits(KEY, (range(5, 0, -1),))
    with pytest.raises(ValueError, match="5 dimensions"):
        bits(KEY, (1, 1, 1, 1, 1))


def test_a_batch_of_keys_gives_what_each_key_gives():
    keys = fold(KEY, torch.arange(12).reshape(3, 4))
    assert keys.shape == (3, 4, 2)
    drawn = bits(keys, (5, 6))
    assert drawn.shape == (3, 4, 5, 6)
    assert torch.equal(drawn[2, 1], bits(keys[2, 1], (5, 6)))
    assert torch.equal(keys[2, 1], fold(KEY, 9))


def test_folded_keys_differ_between_all_neighbours():
    numbers = fold(KEY, torch.arange(4096), torch.arange(16)[:, None]).reshape(-1, 2)
    assert len(torch.unique(numbers, dim=0)) == 4096 * 16
    named = [fold(KEY, name) for name in ("blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight", "wte", "")]
    assert len({tuple(k.tolist()) for k in named}) == len(named)
    assert not torch.equal(fold(KEY, 1, 2), fold(KEY, 2, 1))
    assert not torch.equal(fold(KEY, 1), fold(KEY, 1 + (1 << 32)))


def test_row_chunks_cover_a_part_once():
    whole = bits(KEY, (50, 30))
    joined = torch.zeros_like(whole)
    for rows, part in row_chunks((50, 30), elements=200):
        joined[rows] += bits(KEY, part)
    assert torch.equal(joined, whole)


def chi_square_z(counts: np.ndarray) -> float:
    """How many standard deviations a chi-square statistic over equally likely cells lies from its mean."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_byte_of_a_word_is_uniform(shift):
    values = (bits(KEY, (1024, 1024)) >> shift & 255).flatten().numpy()
    assert abs(chi_square_z(np.bincount(values, minlength=256))) < 5


def neighbours():
    """Streams that must be independent of the first: neighbouring keys, indices, layers, samples and seeds."""
    shape, n = (256, 1024), 256
    base = bits(fold(KEY, 7), shape)
    return base, {
        "key": bits(fold(KEY, 8), shape),
        "raw key": bits(fold(KEY, 7) ^ torch.tensor([1, 0]), shape),
        "row": bits(fold(KEY, 7), (range(1, n + 1), 1024)),
        "column": bits(fold(KEY, 7), (256, range(1, 1025))),
        "block of four": bits(fold(KEY, 7), (256, range(4, 1028))),
        "dimension": bits(fold(KEY, 7), (range(1, 2), 256, 1024))[0],
        "layer": bits(fold(fold(KEY, 7), 1), shape),
        "seed": bits(fold(root_key(2), "test", 7), shape),
    }


@pytest.mark.slow(1)
def test_streams_of_neighbouring_keys_indices_and_layers_are_independent():
    base, others = neighbours()
    bit = 1 << torch.arange(32)
    for name, other in others.items():
        # Each of the 32 bits agrees with its partner in half of the cases ...
        agree = ((base ^ other)[..., None] & bit == 0).double().mean(dim=(0, 1))
        assert ((agree - 0.5).abs() * 2 * math.sqrt(base.numel())).max() < 5, name
        # ... and the pair of leading bytes fills its 65,536 cells evenly.
        pairs = ((base >> 24) * 256 + (other >> 24)).flatten().numpy()
        assert abs(chi_square_z(np.bincount(pairs, minlength=65536))) < 5, name


def test_one_flipped_key_bit_flips_half_of_the_output_bits():
    base = bits(KEY, (4096,))
    for word, position in itertools.product((0, 1), range(0, 32, 5)):
        flip = torch.zeros(2, dtype=torch.int64)
        flip[word] = 1 << position
        changed = bits(KEY ^ flip, (4096,)) ^ base
        share = sum(int(v).bit_count() for v in changed) / (4096 * 32)
        assert abs(share - 0.5) * 2 * math.sqrt(4096 * 32) < 5


def test_uniform_has_the_moments_of_a_uniform():
    u = uniform(KEY, (1000, 1000))
    assert u.min() > 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 5 / math.sqrt(12e6)
    assert abs(u.var() - 1 / 12) < 1e-3


def test_normal_has_the_moments_and_tails_of_a_normal():
    z = normal(KEY, (1000, 1000)).flatten()
    n = len(z)
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - moment) < 5 * math.sqrt(variance / n), power
    for x in (-3.0, -1.0, 0.0, 0.5, 2.0, 4.0):
        expected = 0.5 * math.erfc(-x / math.sqrt(2))
        assert abs((z < x).double().mean() - expected) < 5 * math.sqrt(expected * (1 - expected) / n), x
    pairs = z.reshape(-1, 2)  # the two normals that one evaluation yields
    assert abs((pairs[:, 0] * pairs[:, 1]).mean()) < 5 / math.sqrt(n / 2)


@pytest.mark.slow(2)
@pytest.mark.compiler
def test_compiled_bits_equal_eager_bits():
    """Inductor's index algebra must not meet Philox's multiplications (it would do them in 32 bits)."""
    part = (range(3, 40), range(5, 70))
    compiled = torch.compile(bits, fullgraph=True, dynamic=False)
    keys = fold(KEY, torch.arange(3))
    assert torch.equal(compiled(keys, part), bits(keys, part))


def test_rows_of_their_own_equal_that_part_of_the_whole():
    keys, rows = fold(KEY, torch.arange(3)), torch.tensor([5, 0, 1000])
    for last in (1, 4, 30, 31):
        found = uniform_rows(keys, rows, last)
        for i, row in enumerate(rows.tolist()):
            assert torch.equal(found[i], uniform(keys[i], (range(row, row + 1), last))[0])


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, -(2**63), 123456789123])
def test_words_of_a_key_are_those_of_its_tensor(seed):
    for data in ((), ("text",), ("text", 0, 3), (2**40, "other", 127)):
        assert list(fold_words(seed, *data)) == fold(root_key(seed), *data).tolist()


@each_pair(
    batch=[(), (3,), (3, 1)],
    sizes=[(7,), (3, 33), (2, 3, 0), (0, 2, 5), (2, 2, 3, 9), (140, 70)],
    start=[0, 5, 2**31 - 40],
)
def test_few_words_are_those_of_many(monkeypatch, batch, sizes, start):
    """NumPy draws few words on a CPU, torch all others."""
    numbers = torch.arange(math.prod(batch)).reshape(batch)
    key, part = fold(root_key(11), numbers), [range(start, start + 2 * n, 2) for n in sizes]
    in_attention = [functools.partial(attention_mask, p=p) for p in (0.3, 0.5) if len(part) > 1]
    draws = [bits, functools.partial(keep_mask, p=0.3), normal, *in_attention]
    few = [draw(key, part) for draw in draws]
    monkeypatch.setattr("dtgpt.ops.few_words.by_numpy.FEW", -1)
    many = [draw(key, part) for draw in draws]
    for a, b in zip(few, many, strict=True):
        assert a.shape == (*batch, *sizes) and a.dtype == b.dtype and torch.equal(a, b)

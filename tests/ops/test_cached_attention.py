"""Attention over a cache: rows and chunks against attention over whole sequences, whatever the memory holds behind."""

import math
from itertools import pairwise, product
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtgpt.ops.attention.cached import attend_chunk, attend_rows
from dtgpt.ops.attention.core import Backend, causal_attention
from dtgpt.ops.kernels.attention.cached import SPLIT, spread_splits
from dtgpt.ops.kernels.attention.flash import reference
from dtgpt.ops.kernels.decode.blocks import choose_tile

POSITIONS, HEADS, DIM, SLOTS = 12, 4, 8, 5
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # ||a - b|| / ||b||
quick = settings(deadline=None, max_examples=25)


def sequence(length, kv_heads, dtype=torch.float32, seed=0):
    """q [1, T, N, D] and k, v [1, T, N_kv, D]."""
    generator = torch.Generator().manual_seed(seed)
    heads = HEADS, kv_heads, kv_heads
    return [torch.randn(1, length, n, DIM, generator=generator).to(dtype) for n in heads]


def poisoned_cache(kv_heads, dtype=torch.float32):
    return [torch.full((SLOTS, kv_heads, POSITIONS, DIM), math.nan, dtype=dtype) for _ in range(2)]


def check(found, expected, dtype=torch.float32):
    assert found.shape == expected.shape and found.dtype == dtype
    assert (found.double() - expected.double()).norm() <= TOLERANCE[dtype] * expected.double().norm()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
def test_rows_attend_to_their_own_slot_up_to_their_position(kv_heads, dtype):
    keys, values = poisoned_cache(kv_heads, dtype)
    lengths, slots = [1, POSITIONS, 7], [3, 0, 4]
    rows, expected = [], []
    for length, slot in zip(lengths, slots, strict=True):
        q, k, v = sequence(length, kv_heads, dtype, seed=slot)
        keys[slot, :, : length - 1], values[slot, :, : length - 1] = (t[0, :-1].transpose(0, 1) for t in (k, v))
        rows.append([t[0, -1] for t in (q, k, v)])
        expected.append(reference(*(t.double() for t in (q, k, v)), key=None, p=0.0)[0, -1])
    q, k, v = (torch.stack(parts) for parts in zip(*rows, strict=True))
    found = attend_rows(q, k, v, keys, values, torch.tensor(slots), torch.tensor(lengths) - 1)
    check(found, torch.stack(expected), dtype)
    for length, slot, (_, k, v) in zip(lengths, slots, rows, strict=True):
        assert torch.equal(keys[slot, :, length - 1], k) and torch.equal(values[slot, :, length - 1], v)
        assert keys[slot, :, length:].isnan().all() and values[slot, :, length:].isnan().all()
    assert keys[[1, 2]].isnan().all()


@pytest.mark.slow(2)
@pytest.mark.parametrize("backend", get_args(Backend))
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_chunks_with_borders_anywhere_attend_as_the_whole_sequence(backend, kv_heads):
    q, k, v = sequence(POSITIONS, kv_heads)
    expected = causal_attention(q, k, v, backend="explicit")

    @quick
    @given(st.sets(st.integers(1, POSITIONS - 1)))
    def run(cuts):
        keys, values = poisoned_cache(kv_heads)
        borders = [0, *sorted(cuts), POSITIONS]
        pieces = [
            attend_chunk(q[:, a:b], k[:, a:b], v[:, a:b], keys, values, slot=2, first=a, backend=backend)
            for a, b in pairwise(borders)
        ]
        check(torch.cat(pieces, dim=1), expected)
        assert torch.equal(keys[2], k[0].transpose(0, 1)) and torch.equal(values[2], v[0].transpose(0, 1))
        assert keys[[0, 1, 3, 4]].isnan().all()

    run()


def test_every_split_has_one_program():
    lengths, rows_of = (1, SPLIT, 1024, 1025, 2048, 2049, 40960, 131072), (1, 15, 16, 17, 33, 64, 65, 256, 512)
    for length, rows, room in product(lengths, rows_of, (False, True)):
        splits = math.ceil(length / SPLIT)
        programs, each, step = spread_splits(splits, rows, room)
        found = [
            split
            for program in range(programs)
            for split in (range(program, splits, step) if step > 1 else range(program * each, (program + 1) * each))
        ]
        assert sorted(split for split in found if split < splits) == list(range(splits)), (length, rows)
        assert each == 1 or step == 1


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_a_tile_of_the_projection_to_q_k_and_v_lies_within_a_head(head_dim):
    for rows in (1, 16, 32, 64, 256):
        for columns, size in ((3072, 1024), (6144, 4096), (36864, 12288)):
            assert head_dim % choose_tile(rows, columns, 1, size, head_dim, 132).BN == 0

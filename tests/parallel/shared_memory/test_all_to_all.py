"""Exchanges of tokens for heads one behind the other, where ranks are late: no rank may overwrite what another one has
still to take, nor take what has not come."""

import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.config.plan_choice import parse_plan
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shared_memory import all_to_all
from dtgpt.parallel.shared_memory.all_to_all import ROOM, SMALL, TokenExchange
from dtgpt.parallel.shared_memory.arena import share
from dtgpt.parallel.shared_memory.barrier import Barrier
from tests.support.bodies_pushes import shared_files
from tests.support.ranks import pool

TOKEN = 2 * 2 * 16 * 4  # bytes of a token of two samples, of two heads for each rank
# Tokens of exchanges of 1 to 5 turns, where a half has 4: odd counts behind odd and even ones, and even ones, too.
TOKENS = [4, 3, 8, 7, 12, 9, 1, 5, 18, 13, 16, 4, 20, 2, 6, 11]


def late(wait: Callable[[Barrier], None]) -> Callable[[Barrier], None]:
    """Let about half of the ranks be late behind each barrier."""
    draw = random.Random(dist.get_rank())

    def wait_and_sleep(barrier: Barrier) -> None:
        wait(barrier)
        if draw.random() < 0.5:
            time.sleep(0.005)

    return wait_and_sleep


def exchanged(exchange: TokenExchange | None, tokens: int, seed: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Heads for tokens and tokens for heads; None: by gloo."""
    ranks, rank = group.size(), group.rank()
    torch.manual_seed(ranks * seed + rank)
    by_tokens, by_heads = torch.randn(2, tokens, 2 * ranks, 16), torch.randn(2, tokens * ranks, 2, 16)
    if exchange:
        return [*exchange.to_heads([by_tokens]), *exchange.to_tokens([by_heads])]
    found = []
    for x, cut, joined in ((by_tokens, 2, 1), (by_heads, 1, 2)):
        every = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(every, x, group=group)
        found.append(torch.cat([part.chunk(ranks, cut)[rank] for part in every], joined))
    return found


def compare(folder: Path, area_tokens: int, small: int, sizes: list[int]) -> tuple[list[int], int]:
    """(which exchanges did not have the bits of gloo, how often the ranks met), as one of the ranks. small: tokens of
    the largest message that takes one turn."""
    world = dist.get_world_size()
    mesh = Mesh(parse_plan(f"tp{world}", {}).for_world(world), torch.device("cpu"))
    group = mesh.tp_group
    expected = [exchanged(None, tokens, seed, group) for seed, tokens in enumerate(sizes)]
    with (
        shared_files(folder) as count,
        mock.patch.object(all_to_all, "SMALL", small * TOKEN),
        mock.patch.object(Barrier, "wait", late(Barrier.wait)),
    ):
        areas = share(mesh, group, [TokenExchange.bytes(TOKEN, area_tokens, world), Barrier.bytes(world)])
        made = TokenExchange(areas[0], Barrier(areas[1]))
        found = [exchanged(made, tokens, seed, group) for seed, tokens in enumerate(sizes)]
    pairs = zip(found, expected, strict=True)
    return [i for i, (a, b) in enumerate(pairs) if not all(map(torch.equal, a, b))], count["met"]


@pytest.mark.slow(3)
@pytest.mark.parametrize("ranks", [2, 3])
def test_late_ranks_find_what_was_sent(tmp_path, ranks):
    turns = [-(-tokens // 4) for tokens in TOKENS]
    assert {(a % 2, b % 2) for a, b in pairwise(turns)} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for wrong, met in pool().run(ranks, compare, tmp_path, 4, 4, TOKENS):
        assert not wrong
        assert met == 2 * sum(count + count % 2 for count in turns)


def test_larger_messages_than_small_ones_take_two_turns(tmp_path):
    for wrong, met in pool().run(2, compare, tmp_path, 40, 4, [5, 40, 39, 4]):
        assert not wrong
        assert met == 2 * 4 * 2  # of the small one, too: one before it


@pytest.mark.parametrize("token_bytes, tokens, turn", [
    (SMALL // 256, 256, SMALL),
    (SMALL // 256, 257, SMALL // 256 * 129),
    (1 << 12, ROOM >> 12, ROOM // 2),
    (1 << 12, ROOM, ROOM // 2),
    (3 << 10, ROOM, ROOM // 2 - 2048),  # whole tokens
    (ROOM, 7, ROOM),
])  # fmt: skip
def test_the_area_has_places_for_two_turns_from_each_other_rank(token_bytes, tokens, turn):
    assert TokenExchange.bytes(token_bytes, tokens, 4) == 3 * 2 * turn

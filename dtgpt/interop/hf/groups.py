"""Matrices that dtgpt packs into one by groups: a head of keys and values with its queries, a gate with its up."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.models.source import Part, cut


def joined(stored: list[Tensor], rows: Sequence[int], part: Part | None) -> Tensor:
    """Return the elements `part` of the packed matrix whose groups have `rows` rows of each stored one. Only the groups
    with these elements are looked at, since `stored` may be mapped from a file."""
    if len(stored) == 1:
        return cut(stored[0], part)
    size = sum(rows)
    wanted, *columns = part or tuple(map(range, (sum(map(len, stored)), *stored[0].shape[1:])))
    first, last = wanted.start // size, math.ceil(wanted.stop / size)
    groups = [
        cut(t, (range(first * n, last * n), *columns)).unflatten(0, (-1, n)) for t, n in zip(stored, rows, strict=True)
    ]
    return torch.cat(groups, dim=1).flatten(0, 1)[wanted.start - first * size : wanted.stop - first * size]


def separated(whole: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Return the matrices of which `joined` makes `whole`."""
    if len(rows) == 1:
        return [whole]
    return [part.flatten(0, 1) for part in whole.unflatten(0, (-1, sum(rows))).split(list(rows), dim=1)]

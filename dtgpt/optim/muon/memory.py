"""The memory that an update by Muon works with, from shapes alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Parameter, Shape, inventory
from dtgpt.models.shared.packed import pieces
from dtgpt.optim.muon.matrices import is_orthogonalized, owners_of, rounds_of
from dtgpt.optim.muon.newton_schulz import flops


@dataclass(frozen=True)
class _Round:
    """Elements of one round on the rank that owns most of it."""

    owned: int  # of whole matrices
    part: float  # that this rank holds of all matrices of the round
    largest: float  # of a part
    batches: float  # bytes at once, of the matrices that are orthogonalised


@lru_cache(maxsize=256)
def update_bytes(
    steps: int, per_head: bool, model: ModelConfig, blocks: tuple[int, ...], ranks: int, parts: int, width: int
) -> int:
    """Return the bytes of an update at its fullest moment, beside weights, gradients and states.

    steps, per_head: `newton_schulz_steps` and `per_head` of a `MuonConfig`. ranks: of a stage with these blocks; parts:
    in which they cut each matrix; width: bytes of an element that travels.
    """
    rounds = _rounds(steps, per_head, model, blocks, ranks, parts, width)
    none = _Round(0, 0, 0, 0)
    most = 0.0
    for before, now, after in zip([none, *rounds], rounds, [*rounds[1:], none], strict=False):
        leaving, left = _left(before, ranks, parts, width), _left(now, ranks, parts, width)
        arriving, whole = _arriving(after, ranks, parts, width), width * now.owned
        others = whole + arriving + leaving  # beside what is made of the matrices of this round
        made = 0 if ranks == 1 else whole  # else it is what leaves
        orthogonalizing = whole + now.batches
        sending = made + left
        applying = left + _apply(before)
        most = max(most, others + max(orthogonalizing, sending, applying), whole + left + _apply(now))
    return round(most)


def _apply(of: _Round) -> float:
    """Return the bytes of the weight times its decay, its change, and their difference, in fp32."""
    return 3 * 4 * of.largest


def _rounds(
    steps: int, per_head: bool, model: ModelConfig, blocks: Sequence[int], ranks: int, parts: int, width: int
) -> list[_Round]:
    known = inventory(model)
    weights = [p for block in blocks for p in known.of_block(block) if is_orthogonalized(p.shape, p.role)]
    if not weights:
        return []
    pieces = [_pieces(per_head, model, weight) for weight in weights]
    costs = [sum(flops(rows, columns, steps) for rows, columns in shapes) for shapes in pieces]
    sizes = [math.prod(weight.shape) for weight in weights]
    owners = owners_of(costs, ranks)
    made = []
    for taken in rounds_of(costs, sizes, owners):
        own = [index for index in taken if owners[index] == owners[taken[0]]]
        made.append(
            _Round(
                owned=sum(sizes[index] for index in own),
                part=sum(sizes[index] for index in taken) / parts,
                largest=max(sizes[index] for index in taken) / parts,
                batches=_batches([shape for index in own for shape in pieces[index]], width),
            )
        )
    return made


def _pieces(per_head: bool, model: ModelConfig, weight: Parameter) -> list[Shape]:
    """Return the shapes of the matrices in a weight."""
    return [(sum(map(len, rows)), weight.shape[-1]) for rows in pieces(model, weight, per_head)]


def _batches(shapes: list[Shape], width: int) -> float:
    """Return the bytes at once of the iterations, all matrices of a shape together: the last batch's result, and the
    stacked matrices, then in fp32 divided by their norms, and rounded; or the result of an iteration and its Gram
    matrices."""
    most, before = 0.0, 0
    for (rows, columns), group in groupby(sorted(shapes, key=shapes.index)):
        count = len(list(group)) * rows * columns
        gram = min(rows, columns) / max(rows, columns)
        most = max(most, width * before + count * max(2 * width + 4, width * (3 + gram)))
        before = count
    return most


def _arriving(of: _Round, ranks: int, parts: int, width: int) -> float:
    """Return the bytes of a round's directions on their way to the owners."""
    if parts > 1:
        return width * (of.part + of.owned)
    return width * (of.part if ranks > 1 else of.owned)


def _left(of: _Round, ranks: int, parts: int, width: int) -> float:
    """Return the bytes of a round's results on their way to all that hold a part: what is sent and what arrives."""
    return width * (of.owned * (ranks / parts) + of.part if ranks > 1 else of.owned)

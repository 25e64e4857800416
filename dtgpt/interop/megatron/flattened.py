"""Tensors that Megatron-LM's distributed optimizer stored before 2025: each rank's block of a parameter as one row.

A tensor `[X, Y]` that ranks cut into blocks `[x, y]` is `[X / x, Y / y, x * y]` there, so that replicas can share a
block at any element. One of a single dimension may also be stored as it is.
"""

import math

import torch
from torch import Tensor

from dtgpt.interop.distcp import DistributedFolder
from dtgpt.models.inventory import Shape
from dtgpt.models.source import Ranges
from dtgpt.util.errors import UserError, shown, shown_name


def block_shape(stored: Shape, shape: Shape) -> Shape | None:
    """Return the shape of the blocks in which a tensor of `shape` is stored as one of shape `stored`, None where it
    cannot be so."""
    if len(stored) != len(shape) + 1 or any(not n or whole % n for n, whole in zip(stored, shape, strict=False)):
        return None
    block = tuple(whole // n for n, whole in zip(stored, shape, strict=False))
    return block if math.prod(block) == stored[-1] else None


def check_shape(folder: DistributedFolder, key: str, shape: Shape) -> None:
    """Raise UserError where a tensor is missing, or cannot be one of this shape."""
    if key not in folder.tensors:
        raise UserError(f"{folder.path} has no tensor {shown_name(key)}; copy the whole checkpoint")
    stored = folder.tensors[key].shape
    if stored != shape and block_shape(stored, shape) is None:
        raise UserError(
            f"{folder.path} has {shown_name(key)} of shape {shown(list(stored))}, where its parameter has "
            f"{list(shape)}; copy the whole checkpoint"
        )


def read_as_shaped(folder: DistributedFolder, key: str, shape: Shape, part: Ranges) -> Tensor:
    """Return the elements `part` of a tensor of `shape`, however it is stored. Raises UserError as `check_shape`."""
    check_shape(folder, key, shape)
    stored = folder.tensors[key].shape
    block = block_shape(stored, shape) if stored != shape else None
    if block is None:
        return folder.read(key, part)
    grid = [range(r.start // b, -(-r.stop // b)) if r else range(0) for r, b in zip(part, block, strict=True)]
    rows = folder.read(key, (*grid, range(stored[-1]))).reshape(*map(len, grid), *block)
    order = [axis for pair in zip(range(len(block)), range(len(block), 2 * len(block)), strict=True) for axis in pair]
    whole = rows.permute(order).reshape([len(g) * b for g, b in zip(grid, block, strict=True)])
    cuts = (
        slice(r.start - g.start * b, r.stop - g.start * b) if r else slice(0)
        for r, g, b in zip(part, grid, block, strict=True)
    )
    return whole[tuple(cuts)].to(torch.float32)

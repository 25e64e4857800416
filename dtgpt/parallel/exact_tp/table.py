"""Rows of a token table that is cut by rows.

Tokens of other ranks read nothing, and add nothing to a gradient. `DTensor` would let them add zeros to the first row
of the rank; a GPU adds the gradients of a row in groups, which zeros divide otherwise.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.local_tensors import local


def look_up(tokens: Any, table: Any) -> Any:
    """Return the addend of this rank, a DTensor, of the rows `[B, T, H]` of tokens int64 `[B, T]`, of a table that is a
    DTensor cut by rows."""
    mesh = table.device_mesh
    first = -(-len(table) // mesh.size()) * mesh.get_local_rank()
    from torch.distributed.tensor import Partial

    ids = tokens.to_local() if hasattr(tokens, "to_local") else tokens
    return type(table).from_local(_Rows.apply(local(table), ids - first), mesh, [Partial()], run_check=False)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, places: Tensor) -> Tensor:
        mine = (places >= 0) & (places < len(table))
        ctx.rows = len(table)
        ctx.save_for_backward(torch.where(mine, places, len(table)))
        found = F.embedding(places.clamp(0, len(table) - 1), table)
        return torch.where(mine.unsqueeze(-1), found, torch.zeros_like(found))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (places,) = ctx.saved_tensors  # those of other ranks: one more row, which is dropped
        made = torch.ops.aten.embedding_dense_backward(grads[0].contiguous(), places, ctx.rows + 1, -1, False)
        return made[:-1].contiguous(), None

"""Values of rank 0 on every rank: JSON in a tensor of bytes, since pickles would execute what arrives."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dtgpt.parallel.mesh import Mesh
from dtgpt.util.errors import UserError

K = TypeVar("K")


def broadcast_json(mesh: Mesh, value: Any = None) -> Any:
    """Return the value of rank 0 on every rank: texts, numbers, and lists and dicts of these."""
    if mesh.world == 1:
        return value
    body = torch.frombuffer(bytearray(json.dumps(value).encode() if mesh.rank == 0 else b" "), dtype=torch.uint8)
    size = torch.tensor(len(body))
    dist.broadcast(size, 0, group=mesh.commands)
    if mesh.rank:
        body = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(body, 0, group=mesh.commands)
    return json.loads(body.numpy().tobytes())


def from_rank_0(mesh: Mesh, work: Callable[[], Any]) -> Any:
    """Return on every rank what `work` returns on rank 0, and raise its UserError on every rank."""
    return told_by_rank_0(mesh, lambda: (work(), None))[0]


def told_by_rank_0(mesh: Mesh, work: Callable[[], tuple[Any, K]]) -> tuple[Any, tuple[K] | None]:
    """Call `work` on rank 0, and return the first of its two values on every rank. The second one stays there: it comes
    as (value,), None on the other ranks. Raise a UserError of `work` on every rank."""
    told = kept = sentence = None
    if mesh.rank == 0:
        try:
            told, value = work()
            kept = (value,)
        except UserError as error:
            if mesh.world == 1:
                raise
            sentence = str(error)
    told, sentence = broadcast_json(mesh, [told, sentence])
    if sentence is not None:
        raise UserError(sentence)
    return told, kept

"""Sums, rows and columns of tensor-parallel ranks by kernels that write to each other's memory, `exchange.cu`.

For kilobytes, where latency counts. A number and its flag are one word of 8 bytes (NCCL's protocol LL). A sum has the
order of the ranks, and therefore the same bits on each rank and for any number of rows. All ranks must make the same
calls in the same order, on one stream.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("exchange.cu")
MOST_RANKS = 8
CAPACITY = 1 << 18  # words that a rank sends at once: beyond, collectives that send no flags are as fast
WORD = 8  # bytes


class Fields(ctypes.Structure):
    """An exchange as kernels see it; `exchange.cuh` has the meaning of the fields."""

    _fields_ = (
        ("areas", ctypes.c_void_p * MOST_RANKS),
        ("state", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("capacity", "rank", "ranks")),
    )


class CollectiveArguments(ctypes.Structure):
    """The arguments of a collective; `exchange.cu` has the meaning of the fields."""

    _fields_ = (
        ("exchange", Fields),
        *((name, ctypes.c_void_p) for name in ("input", "ids", "out")),
        *((name, ctypes.c_int64) for name in ("first", "count")),
        *((name, ctypes.c_int) for name in ("groups", "words", "width", "rows", "whole")),
    )


STRUCTS = (("Exchange", Fields), ("Collective", CollectiveArguments))  # that exchange.cu has, too


class Exchange:
    """The exchanges of one rank with the others."""

    def __init__(self, built: ctypes.CDLL, memories: Sequence[Tensor], rank: int):
        """built: the library of SOURCE. memories: of each rank, at most MOST_RANKS, zero at first, of `bytes_of`. The
        GPU of this one, `rank`, reaches all."""
        self.ranks, self.rank, self._memories = len(memories), rank, memories
        self._state = torch.zeros(2, dtype=torch.int32, device=memories[rank].device)
        places = (ctypes.c_void_p * MOST_RANKS)(*(memory.data_ptr() for memory in memories))
        self.fields = Fields(places, self._state.data_ptr(), CAPACITY, self.rank, self.ranks)
        self._launch = {}
        for name in ("sum", "look_up", "gather"):
            function = getattr(built, f"launch_{name}")
            function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_char_p
            self._launch[name] = function

    def sum(self, parts: Tensor) -> Tensor | None:
        """Return the sum `[1, M, H]` over groups and ranks of fp32 `[G, M, H]`; None where it is too large."""
        words = parts[0].numel()
        if words > CAPACITY:
            return None
        out = torch.empty_like(parts[:1])
        self._call("sum", input=parts.contiguous(), out=out, groups=len(parts), words=words)
        return out

    def look_up(self, ids: Tensor, table: Tensor, first: int) -> Tensor | None:
        """Return rows `[M, H]` of a 16-bit table that is cut over the ranks by rows, of `ids` int64 `[M]`. table: this
        rank's rows, from `first` on. None where there are too many or where rows are not whole words."""
        width, rest = divmod(table.shape[1], 2)
        words = len(ids) * width
        if words > CAPACITY or rest or table.itemsize != 2:
            return None
        out = table.new_empty(len(ids), table.shape[1])
        numbers = {"first": first, "count": len(table), "words": words, "width": width}
        self._call("look_up", input=table.contiguous(), ids=ids.contiguous(), out=out, **numbers)
        return out

    def gather(self, part: Tensor, columns: int) -> Tensor | None:
        """Return fp32 `[M, columns]` from the equally many columns of each rank, of which the last one may have fewer.
        None where it is too large, or where a rank has none."""
        width, rows = -(-columns // self.ranks), len(part)
        if rows * width > CAPACITY or (self.ranks - 1) * width >= columns:
            return None
        out = part.new_empty(rows, columns)
        self._call("gather", input=part.contiguous(), out=out, width=width, rows=rows, whole=columns)
        return out

    def _call(self, name: str, out: Tensor, **more: Any) -> None:
        numbers = {key: value.data_ptr() if isinstance(value, Tensor) else value for key, value in more.items()}
        arguments = CollectiveArguments(exchange=self.fields, out=out.data_ptr(), **numbers)
        with torch.cuda.device(out.device):
            error = self._launch[name](ctypes.byref(arguments), torch.cuda.current_stream().cuda_stream)
        if error is not None:
            raise RuntimeError(f"the exchange {name} cannot be launched: {error.decode()}")


def bytes_of(ranks: int) -> int:
    """Return the bytes of each rank's memory: `[2, ranks, CAPACITY]` words."""
    return 2 * ranks * CAPACITY * WORD

"""All-to-alls by which ranks exchange tokens for heads through memory that they share: each writes what another one is
to have, as it lies, to that one's memory, so that nothing is packed before."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.comm.arena import Area
from dtgpt.comm.barrier import Barrier
from dtgpt.comm.scatter import row_of

ROOM = 1 << 26  # bytes that arrive from each other rank at once, at most
WORD = 16  # bytes that a thread of a GPU copies best


class TokenExchange:
    """Exchanges of tokens and heads, in the same order on all ranks of a group."""

    @staticmethod
    def bytes(token_bytes: int, tokens: int, ranks: int) -> int:
        """Return the bytes of the area for messages to each other rank of up to `tokens` x `token_bytes`, a multiple of
        WORD: larger messages than ROOM take several turns."""
        return (ranks - 1) * max(token_bytes, min(ROOM // token_bytes, tokens) * token_bytes)

    def __init__(self, area: Area, barrier: Barrier):
        """area: for what comes from the other ranks. barrier: of the stream on which exchanges run."""
        self._area, self._barrier = area, barrier
        rows = [memory.view(area.ranks - 1, -1) for memory in area.of_ranks]
        self._sent = {rank: rows[rank][row_of(area.rank, rank)] for rank in area.others}
        self._received = {rank: rows[area.rank][row_of(rank, area.rank)] for rank in area.others}

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return for each `[B, T, N, D]`, of this rank's tokens, `[B, ranks T, N / ranks, D]`: the tokens of all ranks
        in their order, and this rank's heads."""
        ranks = self._area.ranks
        whole = [x.new_empty(x.shape[0], ranks * x.shape[1], x.shape[2] // ranks, x.shape[3]) for x in tensors]
        self._exchange([_by_heads(x, ranks) for x in tensors], [x.chunk(ranks, dim=1) for x in whole])
        return whole

    def to_tokens(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return for each `[B, ranks T, N, D]`, of this rank's heads, `[B, T, ranks N, D]`: the inverse."""
        ranks = self._area.ranks
        own = [x.new_empty(x.shape[0], x.shape[1] // ranks, ranks * x.shape[2], x.shape[3]) for x in tensors]
        self._exchange([x.chunk(ranks, dim=1) for x in tensors], [_by_heads(x, ranks) for x in own])
        return own

    def _exchange(self, sent: list[Sequence[Tensor]], places: list[Sequence[Tensor]]) -> None:
        """Copy, for each tensor, the part `sent` to each rank to the place of what comes from this one there. All are
        `[B, T, heads, D]`."""
        mine = self._area.rank
        token_bytes = sum(parts[mine][:, :1].nbytes for parts in sent)
        tokens = len(self._area.own) // (self._area.ranks - 1) // token_bytes
        for begin in range(0, sent[0][mine].shape[1], tokens):
            turn = slice(begin, begin + tokens)
            self._barrier.wait()  # by then the others have taken what came before
            for rank, memory in self._sent.items():
                _copy_all(_laid_out(memory, [parts[rank][:, turn] for parts in sent]), [p[rank][:, turn] for p in sent])
            _copy_all([parts[mine][:, turn] for parts in places], [parts[mine][:, turn] for parts in sent])
            self._barrier.wait()
            for rank, memory in self._received.items():
                arrived = _laid_out(memory, [parts[rank][:, turn] for parts in places])
                _copy_all([parts[rank][:, turn] for parts in places], arrived)


def _by_heads(x: Tensor, ranks: int) -> tuple[Tensor, ...]:
    """Return views of the heads of each rank, `[B, T, N / ranks, D]`, of `[B, T, N, D]`."""
    return x.unflatten(2, (ranks, -1)).unbind(2)


def _laid_out(memory: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous tensors of these shapes and types, one behind the other in the memory."""
    found, begin = [], 0
    for x in like:
        found.append(memory[begin : begin + x.nbytes].view(x.dtype).view(x.shape))
        begin += x.nbytes
    return found


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if _has_words(target) and _has_words(source):
            target, source = target.view(torch.complex128), source.view(torch.complex128)  # the type of 16 bytes
        target.copy_(source)


def _has_words(x: Tensor) -> bool:
    """Return whether x is whole words, each at a multiple of WORD bytes."""
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and x.data_ptr() % WORD == 0 and not any(step * x.itemsize % WORD for step in steps)

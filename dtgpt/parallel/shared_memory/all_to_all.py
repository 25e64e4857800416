"""All-to-alls by which ranks exchange tokens for heads through memory that they share: each writes what another one is
to have, as it lies, to that one's memory, so that nothing is packed before. Copies within a rank run beside."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.parallel.narrow_sums.sums import second_stream
from dtgpt.parallel.shared_memory.arena import Area
from dtgpt.parallel.shared_memory.barrier import Barrier
from dtgpt.parallel.shared_memory.scatter import row_of

ROOM = 1 << 26  # bytes for what arrives from each other rank, at most: half of them for a turn
SMALL = 1 << 20  # bytes of the largest message that takes one turn: a half has room for all of it
WORD = 16  # bytes that a thread of a GPU copies best


class TokenExchange:
    """Exchanges of tokens and heads, in the same order on all ranks of a group."""

    @staticmethod
    def bytes(token_bytes: int, tokens: int, ranks: int) -> int:
        """Return the bytes of the area for messages to each other rank of up to `tokens` x `token_bytes`, a multiple of
        WORD: for two turns."""
        return 2 * (ranks - 1) * _tokens_of_turn(token_bytes, tokens) * token_bytes

    def __init__(self, area: Area, barrier: Barrier):
        """area: for what comes from the other ranks. barrier: of the stream on which exchanges run."""
        self._area, self._barrier = area, barrier
        self._stream = second_stream(area.own.device, "copies within a rank") if area.own.is_cuda else None
        rows = [memory.view(area.ranks - 1, 2, -1) for memory in area.of_ranks]  # two halves for each other rank
        self._room = rows[area.rank].shape[2]
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
        `[B, T, heads, D]`.

        A message goes in turns, to one half of the area and the other. While one turn is sent, this rank takes what
        arrived in the turn before, and only then comes to the barrier: who has passed it may overwrite that half. The
        last turn always goes to half 1. So the other ranks have taken all from half 0 when an exchange begins, in
        whatever order CUDA graphs are replayed.
        """
        mine = self._area.rank
        tokens, token_bytes = sent[0][mine].shape[1], sum(parts[mine][:, :1].nbytes for parts in sent)
        size = min(_tokens_of_turn(token_bytes, tokens), self._room // token_bytes)
        turns = [slice(begin, begin + size) for begin in range(0, tokens, size)]
        if len(turns) % 2:
            self._barrier.wait()  # the first turn goes to half 1
        for index, turn in enumerate(turns):
            half = (len(turns) - index) % 2
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream())
            for rank, memory in self._sent.items():
                parts = [whole[rank][:, turn] for whole in sent]
                _copy_all(_laid_out(memory[half], parts), parts)
            with torch.cuda.stream(self._stream):  # None: the current one
                _copy_all([parts[mine][:, turn] for parts in places], [parts[mine][:, turn] for parts in sent])
                if index:
                    self._take(places, turns[index - 1], 1 - half)
            if self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)
            self._barrier.wait()
        self._take(places, turns[-1], 1)

    def _take(self, places: list[Sequence[Tensor]], turn: slice, half: int) -> None:
        """Copy what arrived in a turn, in this half of the area, to its places."""
        for rank, memory in self._received.items():
            parts = [whole[rank][:, turn] for whole in places]
            _copy_all(parts, _laid_out(memory[half], parts))


def _tokens_of_turn(token_bytes: int, tokens: int) -> int:
    """Return how many tokens of a message travel in a turn: all of a small one, else at most half of them."""
    if token_bytes * tokens <= SMALL:
        return tokens
    return max(1, min(ROOM // 2 // token_bytes, -(-tokens // 2)))


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

"""Reduce-scatters that the GPUs' copy engines send, beside products that keep all multiprocessors: a rank copies to the
memory of the others what they are to sum, and adds what came from them by a kernel that reads its own memory alone."""

from collections.abc import Callable

from torch import Tensor

from dtgpt.parallel.collectives import ALIGNED
from dtgpt.parallel.shared_memory.arena import Area, aligned
from dtgpt.parallel.shared_memory.barrier import Barrier

Add = Callable[[Tensor, Tensor, Tensor, int], None]  # what `add` does, with its arguments
ROOM = 1 << 26  # bytes of gradients that arrive from each other rank at once, at most


def add(own: Tensor, others: Tensor, out: Tensor, rank: int) -> None:
    """Set `out [n]` to the sum, in fp32 and in the order of the ranks, of this rank's `own [n]`, which may be `out`,
    and `others [ranks - 1, n]`, contiguous, those of the other ranks."""
    if own.is_cuda:
        from dtgpt.parallel.shared_memory.kernels import launch_add

        launch_add(own, others, out, rank)
    else:
        out.copy_(sum(part.float() for part in (*others[:rank], own, *others[rank:])))


def row_of(source: int, target: int) -> int:
    """Return the row of rank `source` among those of all ranks but `target`."""
    return source if source < target else source - 1


class CopyScatter:
    """Reduce-scatters through memory that the ranks share."""

    @staticmethod
    def bytes(largest: int, ranks: int) -> int:
        """Return the bytes of the area for messages to each other rank of up to `largest` bytes: larger ones than ROOM
        take several turns."""
        return min(ROOM, aligned(largest, ALIGNED)) * (ranks - 1)

    def __init__(self, area: Area, barrier: Barrier):
        """area: for what comes from the other ranks; tensors that are larger take several turns. barrier: of the stream
        on which reduce-scatters run."""
        self._area, self._barrier = area, barrier
        self._capacity = len(area.own) // (area.ranks - 1) // ALIGNED * ALIGNED

    def run(self, whole: Tensor, part: Tensor, add: Add = add) -> None:
        """Queue on the current stream: fill `part [n]` with this rank's part of the sum over the ranks, in fp32 and in
        their order, of the contiguous `whole [ranks n]`. add: adds in another way, `k` elements of a row of `whole
        [ranks k n]` to each of the part."""
        ranks, width = self._area.ranks, whole.numel() // self._area.ranks // part.numel()
        size = self._capacity // whole.itemsize // width
        for columns, out in zip(whole.view(ranks, -1).split(size * width, dim=1), part.split(size), strict=True):
            self._turn(columns, out, add)

    def _turn(self, whole: Tensor, part: Tensor, add: Add) -> None:
        area, mine, size = self._area, self._area.rank, whole.shape[1]
        rows = area.ranks - 1
        received = [memory.view(whole.dtype)[: rows * size].view(rows, size) for memory in area.of_ranks]
        self._barrier.wait()  # by then the others have added what came before
        for rank in area.others:
            received[rank][row_of(mine, rank)].copy_(whole[rank])
        self._barrier.wait()
        add(whole[mine], received[mine], part, mine)

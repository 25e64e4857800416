"""Sums of flat tensors over the ranks of a group, in place, while other kernels run: by NCCL or gloo, or by the GPUs'
copy engines where the ranks share memory."""

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.comm.arena import AllRanks, Area, share
from dtgpt.comm.barrier import Barrier
from dtgpt.comm.scatter import ALIGNED, add, row_of
from dtgpt.util.torch_private import all_gather_single


class FlatSum:
    """The sum over the ranks of one flat tensor, in place, by NCCL or gloo. group: None of one rank."""

    def __init__(self, flat: Tensor, group: dist.ProcessGroup | None):
        self.flat, self.group = flat, group
        self._work: dist.Work | None = None

    def begin(self) -> None:
        """Queue the sum, after what the current stream has to do."""
        if self.group is not None:
            self._work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def wait(self) -> None:
        """Hold the current stream until the last sum is complete."""
        if self._work is not None:
            self._work.wait()

    def held(self) -> list[Tensor]:
        """Return all tensors that the sum needs."""
        return [self.flat]


class NarrowSum(FlatSum):
    """The sum of 16-bit numbers, whose count is a multiple of the number of ranks: half the bytes are sent. Each rank
    sums its piece in fp32 and rounds once, so that the error does not grow with the ranks, as it does where sums are
    passed on."""

    group: dist.ProcessGroup

    def __init__(self, flat: Tensor, group: dist.ProcessGroup, pieces: Tensor | None = None):
        """pieces: memory for what comes from other ranks; None: new memory."""
        super().__init__(flat, group)
        self.pieces = torch.empty_like(flat) if pieces is None else pieces
        self._stream = second_stream(flat.device) if flat.is_cuda else None

    def begin(self) -> None:
        if self._stream is None:
            self.run()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self.run()

    def run(self) -> None:
        """Queue the sum on the current stream."""
        dist.all_to_all_single(self.pieces, self.flat, group=self.group)
        own = self.pieces.view(self.group.size(), -1).sum(0, dtype=torch.float32).to(self.flat.dtype)
        all_gather_single(self.flat, own, self.group)

    def wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def held(self) -> list[Tensor]:
        return [self.flat, self.pieces]


class CopySum(NarrowSum):
    """The same sum by copy engines and a kernel that adds, in memory that the ranks share."""

    @staticmethod
    def bytes(flat_bytes: int, ranks: int) -> int:
        """Return the bytes of the area for a tensor of `flat_bytes`, a multiple of ranks x ALIGNED."""
        return flat_bytes + flat_bytes // ranks * (ranks - 1)

    def __init__(self, area: Area, flat_bytes: int, dtype: torch.dtype, barrier: Barrier, group: dist.ProcessGroup):
        """area: of `bytes`. barrier: of the stream on which sums run, one after the other, in the same order on all
        ranks."""
        self._area, self._barrier = area, barrier
        self._flats = [memory[:flat_bytes].view(dtype).view(area.ranks, -1) for memory in area.of_ranks]
        self._pieces = [memory[flat_bytes:].view(dtype).view(area.ranks - 1, -1) for memory in area.of_ranks]
        super().__init__(self._flats[area.rank].view(-1), group, self._pieces[area.rank])

    def run(self) -> None:
        """Queue the sum on the current stream.

        No rank overwrites what another one still reads: that one added the pieces of the call before, when it came to
        the second barrier of that call, and has used the sum of the call before, when it comes to the first of this.
        """
        mine = self._area.rank
        own = self._flats[mine]
        for rank in self._area.others:
            self._pieces[rank][row_of(mine, rank)].copy_(own[rank])
        self._barrier.wait()
        add(own[mine], self.pieces, own[mine], mine)
        for rank in self._area.others:
            self._flats[rank][mine].copy_(own[mine])
        self._barrier.wait()


@functools.cache
def second_stream(device: torch.device, purpose: str = "sums") -> torch.cuda.Stream:
    """Return the stream of all that has this purpose: PyTorch has few, and would in the end hand out the one that
    computes."""
    return torch.cuda.Stream(device)


def flat_length(numel: int, dtype: torch.dtype, ranks: int) -> int:
    """Return the elements of a flat tensor that holds `numel`: of 16-bit ones, whole words of each rank."""
    multiple = ranks * (1 if dtype == torch.float32 else ALIGNED)
    return -(-numel // multiple) * multiple


def open_sums(
    everyone: AllRanks | None, group: dist.ProcessGroup | None, wires: Sequence[tuple[torch.dtype, int]],
    device: torch.device,
) -> Sequence[FlatSum]:  # fmt: skip
    """Return sums over the ranks of `group` for flat tensors of these types, fp32 or 16 bits, and lengths, of
    `flat_length`. everyone: all ranks, which take part, to share memory where they can; None: they do not try."""
    sizes, areas = [length * dtype.itemsize for dtype, length in wires], None
    if everyone and group:
        ranks = group.size()
        areas = share(everyone, group, [*(CopySum.bytes(size, ranks) for size in sizes), Barrier.bytes(ranks)])
    if group is None or areas is None:
        flats = [torch.zeros(length, dtype=dtype, device=device) for dtype, length in wires]
        return [FlatSum(x, group) if group is None or x.dtype == torch.float32 else NarrowSum(x, group) for x in flats]
    barrier = Barrier(areas.pop())
    return [
        CopySum(area, size, dtype, barrier, group) for area, size, (dtype, _) in zip(areas, sizes, wires, strict=True)
    ]

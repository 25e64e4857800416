"""Points that no rank of a group passes before all have come to them."""

import torch

from dtgpt.parallel.shared_memory.arena import Area

FLAG = 4  # bytes of the number by which a rank tells another one that it has come


class Barrier:
    """A barrier of the programs of a kernel, or of a stream: then with one program. Calls are counted on the device, so
    that a CUDA graph can be replayed. All ranks come to it equally often, each on one stream.

    flags: int64 `[ranks]`, addresses of the int32 `[ranks, programs]` of each rank.
    calls: int32 `[programs]`, how often each program has come.
    """

    @staticmethod
    def bytes(ranks: int, programs: int = 1) -> int:
        """Return the bytes of the area that a barrier needs."""
        return ranks * programs * FLAG

    def __init__(self, area: Area, programs: int = 1):
        self.ranks, self.rank, self._area = area.ranks, area.rank, area
        self.flags = area.addresses()
        self.calls = torch.zeros(programs, dtype=torch.int32, device=area.own.device)

    def wait(self) -> None:
        """Hold the current stream until that of every rank has come here. For a barrier of one program."""
        from dtgpt.parallel.shared_memory.kernels import launch_barrier

        launch_barrier(self)

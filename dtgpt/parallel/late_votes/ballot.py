"""Votes whose result is read one call later, when the device has it at hand."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.parallel.mesh import MAX, Mesh


class Ballot:
    """The votes of a mesh on GPUs."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._before: tuple[Tensor, torch.cuda.Event] | None = None

    def __call__(self, flags: Sequence[bool]) -> list[bool]:
        """Return whether each flag of the previous call was up on any rank, the same on all."""
        ballot = torch.zeros(len(flags), device=self.mesh.device)
        for place, flag in enumerate(flags):
            if flag:
                ballot[place].fill_(1.0)  # a kernel, not a copy that would wait
        self.mesh.all_reduce(ballot, MAX)
        before = self._before
        counted, done = torch.empty(len(flags), pin_memory=True), torch.cuda.Event()
        counted.copy_(ballot, non_blocking=True)
        done.record()
        self._before = counted, done
        if before is None:
            return [False] * len(flags)
        before[1].synchronize()
        return before[0].bool().tolist()

"""How tensors travel between the ranks of a plan: by torch.distributed, or by a faster way that serves what it defines.

PyTorch's collectives gather and scatter along the first dimension, while sequence parallelism cuts the second, so that
`gather` and `sum` take a dimension. A sum of 16-bit gradients that goes from rank to rank is rounded at each;
`NarrowSum` rounds once.

A capability may know such a way between GPUs of one host, a `Transport`. It is asked before the first step, by all
ranks of a mesh together, and answers None on all of them where one cannot use it. All ranks of a group make the same
calls in the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtgpt.config.execution import Settings
from dtgpt.models.decoder import Decoder
from dtgpt.parallel.mesh import Mesh
from dtgpt.util import seams
from dtgpt.util.torch_private import all_gather_single, reduce_scatter_single

ALIGNED = 16  # bytes of a word of narrow numbers, which no rank's piece of a sum cuts


class Collectives(Protocol):
    """All-gather and reduce-scatter along any dimension, without a gradient."""

    def takes(self, whole: list[int], dim: int | None, itemsize: int) -> bool:
        """Return whether tensors of the shape `whole`, cut along `dim`, None: flat, can be gathered and summed."""

    def gather(self, part: Tensor, dim: int | None) -> Tensor:
        """Return the parts of all ranks, concatenated along `dim`; None: each rank has the whole, which is returned."""

    def sum(self, whole: Tensor, dim: int | None) -> Tensor:
        """Return this rank's part along `dim` of the sum over the ranks; None: the whole sum."""


class GroupCollectives:
    """The collectives of a group by NCCL or gloo, for tensors that the ranks cut evenly.

    Functional collectives, which DTensor uses, must not gather in eager execution: gloo of torch 2.13 assigns the name
    of each finished collective to one string from two threads without a lock. Two threads that free the same long name,
    such as "ALLGATHER_COALESCED", corrupt the memory of the process. Names of up to 15 characters are not allocated,
    and those here are shorter.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def gather(self, part: Tensor, dim: int | None) -> Tensor:
        """Return the parts of all ranks, concatenated along `dim`; None: each rank has the whole, which is returned."""
        if dim is None:
            return part.view_as(part)
        if part.itemsize == 1:  # neither gloo nor every NCCL knows 8-bit floats
            part, dtype = part.view(torch.uint8), part.dtype
            return self._concatenated(part, dim).view(dtype)
        return self._concatenated(part, dim)

    def _concatenated(self, part: Tensor, dim: int) -> Tensor:
        parts = part.new_empty(self.group.size() * len(part), *part.shape[1:])
        all_gather_single(parts, part.contiguous(), self.group)
        return torch.cat(parts.chunk(self.group.size()), dim)

    def sum(self, whole: Tensor, dim: int | None) -> Tensor:
        """Return this rank's part along `dim` of the sum over the ranks; None: the whole sum, in place where `whole` is
        contiguous."""
        if dim is None:
            whole = whole.contiguous()
            dist.all_reduce(whole, group=self.group)
            return whole.view_as(whole)
        parts = torch.cat(whole.chunk(self.group.size(), dim)) if dim else whole.contiguous()
        part = parts.new_empty(len(parts) // self.group.size(), *parts.shape[1:])
        reduce_scatter_single(part, parts, self.group)
        return part


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


def flat_length(numel: int, dtype: torch.dtype, ranks: int) -> int:
    """Return the elements of a flat tensor that holds `numel`: of 16-bit ones, whole words of each rank."""
    multiple = ranks * (1 if dtype == torch.float32 else ALIGNED)
    return -(-numel // multiple) * multiple


class Edges(Protocol):
    """The messages between this rank's pipeline stages and those beside them on other ranks."""

    places: int  # of each edge, which micro-batches use in turn

    def begin(self) -> None:
        """Begin a step: nothing of the one before is needed any more."""

    def make_stage(self, *args: Any, **kwargs: Any) -> Any:
        """Return a `pipeline.Stage` that sends and receives by these messages. Arguments: those of `PipelineStage`."""

    def end(self) -> None:
        """Hold the current stream until all is sent."""


@dataclass(frozen=True)
class Transport:
    """A way between ranks, by what it can do; what it leaves out, torch.distributed does.

    reaches: whether a plan may expect to use it among so many ranks, neighbours being so many apart in the mesh.
    serves: whether this process may use it.
    open_collectives: what gathers and sums the activations of a micro-batch over tp.
    open_sums: sums over the ranks of a group for flat tensors of these types, 16 bits, and lengths.
    open_edges: the messages of the stages of this rank, of a shape, with so many places on each edge.
    open_shards: gathers the weights, in a type, and scatters gradients, of another type, of a part that ZeRO cuts;
        returns the shards of parameters that the optimizer writes in 16 bits, too.
    open_exchange: the `ops.kernels.decode.exchange.Exchange` of the tensor-parallel ranks of a group, for decode steps.
    """

    reaches: Callable[[int, int], bool] = lambda ranks, apart: False
    serves: Callable[[], bool] = lambda: False
    open_collectives: Callable[[Settings, Mesh], Collectives | None] = lambda *_: None
    open_sums: Callable[[Mesh, dist.ProcessGroup, Sequence[tuple[torch.dtype, int]]], Sequence[FlatSum] | None] = (
        lambda *_: None
    )
    open_edges: Callable[[Settings, Mesh, tuple[int, ...], int], Edges | None] = lambda *_: None
    open_shards: Callable[[Decoder, Mesh, torch.dtype, torch.dtype], dict[nn.Parameter, Tensor]] = lambda *_: {}
    open_exchange: Callable[[Mesh, dist.ProcessGroup], Any] = lambda *_: None


def transport() -> Transport:
    """Return the way that a capability brings, or none but that of torch.distributed."""
    return next(iter(seams.listed("transports")), Transport())

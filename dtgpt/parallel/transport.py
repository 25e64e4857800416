"""How tensors travel between the ranks of a plan.

torch.distributed carries all of them. A capability may know a faster way between GPUs of one host. It is asked before
the first step, by all ranks of a mesh together, and answers None on all of them where one cannot use it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtgpt.config.execution import Settings
from dtgpt.models.decoder import Decoder
from dtgpt.parallel.collectives import Collectives, FlatSum
from dtgpt.parallel.mesh import Mesh
from dtgpt.util import seams

GPUS_OF_HOST = 8  # that reach each other's memory


class Edges(Protocol):
    """The messages between this rank's pipeline stages and those beside them on other ranks."""

    places: int  # of each edge, which micro-batches use in turn

    def begin(self) -> None:
        """Begin a step: nothing of the one before is needed any more."""

    def joins(self, source: int, target: int) -> bool:
        """Return whether an edge goes from `source`, on another rank, to a stage of this rank."""

    def send(self, tensor: Tensor, source: int, target: int, micro_batch: int) -> None:
        """Send from a stage of this rank to a stage beside it on another rank."""

    def receive(self, source: int, target: int, micro_batch: int) -> Tensor:
        """Wait for what a stage of another rank sends to a stage of this one, and return it: valid until this stage has
        run the micro-batch backward."""

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

"""The processes of a run as a mesh: where each stands in the plan, the groups that they make, and what all ranks decide
together.

torch's `DeviceMesh` has the groups. It needs processes, though, and planning has none: so coordinates are arithmetic on
a rank's number (`RankCoordinates`). And a decision that each rank takes by itself, to stop or to save, would let the
others wait in a collective for ever: such decisions are methods of the mesh.

Ranks are ordered (pp, dp, cp, tp) with tp fastest: those that exchange most are neighbours on one node. A second mesh
of the same ranks has the plan's `own_axes`, in which stacks of matrices lie (`layout.axes_of`). All ranks of a group
make the same calls in the same order; who does not call leaves the others waiting.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtgpt.config.plan import ResolvedPlan
from dtgpt.parallel.layout import axes_of
from dtgpt.util import seams
from dtgpt.util.errors import UserError, sentence_of
from dtgpt.util.torch_private import is_dtensor, set_group_timeout

Result = TypeVar("Result")
MAX = dist.ReduceOp.MAX
DIMENSIONS = ("pp", "replicate", "shard", "tp")  # dp x cp is replicate x shard

messages: dist.ProcessGroup | None = None  # of all ranks, for what is on CPUs; None: the default group, which is gloo


@dataclass(frozen=True)
class RankCoordinates:
    """Coordinates of one rank in a plan."""

    plan: ResolvedPlan
    rank: int

    @property
    def tp(self) -> int:
        return self.rank % self.plan.tp

    @property
    def cp(self) -> int:
        return self.rank // self.plan.tp % self.plan.cp

    @property
    def dp(self) -> int:
        return self.data // self.plan.cp

    @property
    def data(self) -> int:
        """The place among the ranks over which gradients are summed and ZeRO cuts."""
        return self.rank // self.plan.tp % self.plan.data_ranks

    @property
    def pp(self) -> int:
        return self.rank // self.plan.ranks_of_stage

    @property
    def shard(self) -> int:
        return self.data % self.plan.shard

    @property
    def stages(self) -> list[int]:
        """The pipeline stages of this rank, by depth."""
        plan, own = self.plan, self.pp
        return [stage for stage in range(plan.num_stages) if plan.stage_rank(stage) == own]

    @property
    def holds_first(self) -> bool:
        return 0 in self.stages

    @property
    def holds_last(self) -> bool:
        return self.plan.num_stages - 1 in self.stages

    def rank_of(self, stage: int) -> int | None:
        """Return the pipeline rank with which this one exchanges messages where `stage` is beside one of its own; None
        where this rank holds `stage` itself, or there is no such stage."""
        pp = self.plan.stage_rank(stage) if 0 <= stage < self.plan.num_stages else self.pp
        return pp if pp != self.pp else None

    def neighbour(self, pp: int) -> int:
        """Return the rank with the same dp, cp and tp coordinates on pipeline rank `pp`."""
        return self.rank + (pp - self.pp) * self.plan.ranks_of_stage


def own_axes_of(parameter: Tensor) -> dict[str, int]:
    """Return axis -> ranks of the axes of its own that a parameter of the finished model has."""
    if not is_dtensor(parameter):
        return {}
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    return {axis: ranks for axis, ranks in zip(names, mesh.shape, strict=True) if axis not in DIMENSIONS}


class Mesh:
    """The processes of a run. With one process there is no process group, and every method is the identity."""

    def __init__(self, plan: ResolvedPlan, device: torch.device):
        for start in seams.listed("cpu_starts") if device.type == "cpu" else ():
            start()
        self.plan, self.device = plan, device
        self.world = plan.world
        self.rank = dist.get_rank() if self.world > 1 else 0
        self.place = RankCoordinates(plan, self.rank)
        self.devices: DeviceMesh  # of several processes
        self.own_devices: DeviceMesh | None = None  # the same with the plan's `own_axes`; None: it has none
        self.tp_group = self.pp_group = self.replicate_group = self.cp_group = self.tied_group = None
        self._groups: list[dist.ProcessGroup] = []
        self._timeout: timedelta | None = None
        late = seams.listed("late_votes") if device.type == "cuda" else []
        self.late_votes: Callable[[Sequence[bool]], list[bool]] | None = late[0](self) if late else None
        self.before_end: list[Callable[[], None]] = []  # what must be released before the process group ends
        if self.world > 1:
            self.devices = self._grid({})
            if plan.own_axes:
                self.own_devices = self._grid(plan.own_axes)
                self._groups = self.own_devices.get_all_groups()
            self.pp_group = self.devices.get_group("pp")
            self.tp_group = self.devices.get_group("tp") if plan.tp > 1 else None
            self.replicate_group = self.devices.get_group("replicate") if plan.replicate > 1 else None
            self._groups += self.devices.get_all_groups()
            self.cp_group = seams.first("cp_groups", "no capability here cuts samples")(self) if plan.cp > 1 else None
            self.tied_group = self._make_tied_group()

    def _grid(self, own: dict[str, int]) -> DeviceMesh:
        axes = {"pp": self.plan.pp, **axes_of(self.plan, own)}
        kind = "cpu" if self.device.type == "meta" else self.device.type  # tensors without memory have no mesh
        return init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def group(self, axis: str, own: bool) -> dist.ProcessGroup | None:
        """Return this rank's group along an axis of the mesh, of parameters with axes of their own or without; None
        where it is alone."""
        if self.world == 1:
            return None
        group = ((self.own_devices if own else None) or self.devices).get_group(axis)
        return group if group.size() > 1 else None

    def _make_tied_group(self) -> dist.ProcessGroup | None:
        """Return this rank's group of the two ranks that hold the tied embedding, where the first and the last stage
        are on different ranks; None for a rank that holds neither. Every rank takes part in making every group."""
        first, last = 0, self.plan.stage_rank(self.plan.num_stages - 1)
        if first == last:
            return None
        firsts = range(self.plan.ranks_of_stage)
        pairs = [[rank, RankCoordinates(self.plan, rank).neighbour(last)] for rank in firsts]
        held = {rank for pair in pairs for rank in pair}
        others = [rank for rank in range(self.world) if rank not in held]
        # These need no group, but torch names the groups of a later mesh by the number of groups that a rank is in:
        # ranks whose numbers differed would wait for each other for ever.
        group = self.subgroup([*pairs, others] if others else pairs)
        return group if self.rank in held else None

    def subgroup(self, groups: list[list[int]]) -> dist.ProcessGroup:
        """Return a new group: that of the `groups` in which this rank is. All ranks call this at the same point."""
        group = dist.new_subgroups_by_enumeration(groups, timeout=self._timeout)[0]
        self._groups.append(group)
        return group

    @cached_property
    def commands(self) -> dist.ProcessGroup | None:
        """The gloo group in which rank 0 sends commands to the others; None for one process. All ranks ask for it first
        at the same point. Its timeout is a year, since a rank may be idle for days. When a process ends, the others
        fail at once nevertheless."""
        return dist.new_group(backend="gloo", timeout=timedelta(days=365)) if self.world > 1 else None

    def close_commands(self) -> None:
        """Leave the group of `commands`. Ranks that wait in it fail."""
        if group := self.__dict__.pop("commands", None):
            dist.destroy_process_group(group)

    def set_timeout(self, seconds: float) -> None:
        """Set how long a collective of the groups may wait: torch gives new groups a default of its own."""
        self._timeout = timedelta(seconds=seconds)
        for group in self._groups:
            set_group_timeout(self._timeout, group)

    def from_last_stage(self, tensor: Tensor) -> Tensor:
        """Broadcast a tensor in place from the rank of the last stage to the other ranks of its pipeline, and return
        it."""
        if self.plan.pp > 1:
            last = self.place.neighbour(self.plan.stage_rank(self.plan.num_stages - 1))
            dist.broadcast(tensor, last, group=self.pp_group)
        return tensor

    @property
    def copies_of_loss(self) -> int:
        """The number of ranks that share, or repeat, the loss of a step: by it the sum over all ranks is divided."""
        return self.plan.ranks_of_stage

    def sum(self, *values: float | Tensor) -> Tensor:
        """Return the sums over all ranks, one for each value, in float64 on the device."""
        tensors = [torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values]
        return self.all_reduce(torch.stack(tensors), dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        if self.world == 1:
            return value
        return self.all_reduce(torch.tensor(value, dtype=torch.float64, device=self.device), MAX).item()

    def any(self, flag: bool) -> bool:
        """Return whether the flag is up on any rank, the same on all."""
        return bool(self.max(float(flag)))

    def vote(self, *flags: bool) -> list[bool]:
        """Return whether each flag is up on any rank, the same on all. On GPUs a capability returns the result of the
        *previous* call, so that it never waits for the step just queued."""
        if self.world == 1:
            return list(flags)
        if self.late_votes is not None:
            return self.late_votes(flags)
        return self.all_reduce(torch.tensor(flags, dtype=torch.float32, device=self.device), MAX).bool().tolist()

    def all_reduce(self, tensor: Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a tensor of the device in place over all ranks, and return it."""
        if self.world > 1:
            dist.all_reduce(tensor, how)
        return tensor

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Return the values of all ranks, on every rank. group: of all ranks, such as `commands`, whose timeout it
        has."""
        if self.world == 1:
            return [value]
        values = [None] * self.world
        dist.all_gather_object(values, value, group=group or messages)
        return values

    def on_rank_0(self, work: Callable[[], Result]) -> Result:
        """Return on every rank what `work` returns on rank 0; raise its UserError likewise."""
        return self.turns(work, lambda rank: rank == 0)[0]

    def turns(self, work: Callable[[], Any], chosen: Callable[[int], bool]) -> list[Any]:
        """Run `work` on the `chosen` ranks while the others wait. Returns the results by rank, None for the others."""
        result, sentence = None, None
        if chosen(self.rank):
            try:
                result = work()
            except (UserError, OSError, SafetensorError) as error:
                if self.world == 1:
                    raise
                told = sentence_of(error) if isinstance(error, OSError) else None
                sentence = told or str(error) or repr(error)
        outcomes = self.gather((result, sentence))
        for _, refused in outcomes:
            if refused:
                raise UserError(refused)
        return [outcome for outcome, _ in outcomes]

    def agree(self, values: dict[str, Any], remedy: str) -> None:
        """Raise UserError on every rank where a rank's values are not those of rank 0."""
        if self.world > 1:
            agree(values, remedy)


def agree(values: dict[str, Any], remedy: str) -> None:
    """Raise UserError, the same on every rank of the process group, where a rank's values are not those of rank 0."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values, group=messages)
    for rank, theirs in enumerate(everyone):
        for name in sorted(everyone[0].keys() | theirs.keys()):
            ours, other = everyone[0].get(name), theirs.get(name)
            if ours != other:
                raise UserError(f"rank {rank} differs from rank 0 in {name}: {other} there, {ours} on rank 0; {remedy}")

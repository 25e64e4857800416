"""The gradients of one part of the model, and their sums as 64-bit integers, for `dtgpt.parallel.exact_sums.sums`."""

import math
from abc import ABC, abstractmethod
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtgpt.config.execution import Settings
from dtgpt.ops.optim.fixed_point import FixedPointSum, Range, add_integers, add_rounded
from dtgpt.parallel.collectives import ALIGNED
from dtgpt.parallel.gradients import call_on_gradients, local_gradient, local_part
from dtgpt.parallel.layout import chunk
from dtgpt.parallel.mesh import Mesh, own_axes_of
from dtgpt.parallel.shared_memory.arena import aligned
from dtgpt.parallel.shared_memory.pieces import Pieces
from dtgpt.parallel.shared_memory.regions import region_of_tp
from dtgpt.util.torch_private import reduce_scatter_single


class ExactBucket(ABC):
    """The gradients of some parameters, and this rank's part of their sums. ZeRO cuts each parameter by rows into parts
    of equal size. A tied table, whose head's gradient comes apart, is the last parameter."""

    sums: list[Tensor]  # of the parameters
    flat: Tensor  # all of these, where they are integers

    def __init__(self, parameters: list[nn.Parameter], mesh: Mesh, settings: Settings, table: nn.Parameter | None):
        """table: the parameter that has two gradients; None: there is none."""
        self.parameters = sorted(parameters, key=lambda p: p is table)
        shared = mesh.group("shard", bool(own_axes_of(parameters[0])))
        self.ranks, place = (1, 0) if shared is None else (shared.size(), shared.rank())
        self.passes, self.tied = settings.micro_batches, table is not None
        self.shapes = [tuple(map(len, region_of_tp(p, mesh.place))) for p in self.parameters]  # before ZeRO
        self.parts = [-(-rows // self.ranks) * math.prod(rest) for rows, *rest in self.shapes]  # elements of each rank
        self.range = Range.of(settings.dtype, settings.micro_batches * mesh.plan.ranks_of_stage)
        self.done = 0
        self._kept = [(len(chunk(range(rows), self.ranks, place)), *rest) for rows, *rest in self.shapes]
        self._computing: list[nn.Parameter] = []  # what the modules compute with
        self._arrived = 0
        self._diverted: Tensor | None = None  # the head's gradient of a tied table

    def watch(self, computing: list[nn.Parameter]) -> None:
        """Take the gradients of these, which are the parameters or what ZeRO gathers of each."""
        self._computing = computing
        call_on_gradients(computing, self._arrive)

    def divert(self, gradient: Tensor) -> None:
        """Take the head's gradient of the tied table."""
        self._diverted = gradient

    def begin(self, done: int = 0) -> None:
        """Take note that `done` backward passes of the step are over."""
        self.done, self._arrived = done, 0

    def _arrive(self, parameter: nn.Parameter) -> None:
        self._arrived += 1
        if self._arrived < len(self._computing):
            return
        gradients, second = [local_gradient(p) for p in self._computing], None
        if self._diverted is not None:
            second = local_part(self._diverted, self._computing[-1])
        for parameter in self._computing:
            parameter.grad = None
        self._arrived, self._diverted, self.done = 0, None, self.done + 1
        with torch.no_grad():
            self.take(gradients, second)

    @abstractmethod
    def take(self, gradients: list[Tensor], second: Tensor | None) -> None:
        """Add the gradients of the pass that is now `done`, and a second one of the tied table. Gradients are whole but
        for tensor parallelism."""

    @abstractmethod
    def wait(self) -> None:
        """Hold the current stream until the sums are complete."""

    def unit(self) -> Tensor | None:
        """Return what an integer of the sums stands for, fp32 scalar: NaN where a gradient did not fit. None where the
        sums are gradients in fp32."""
        return None

    def _add_rounded(self, own: Tensor, others: Tensor, out: Tensor, rank: int) -> None:
        add_rounded(own, others, out, self.range)

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Return the sums as parts of the beginning of `flat`."""
        pieces = flat[: sum(self.parts)].split(self.parts)
        return [piece[: math.prod(shape)].view(shape) for piece, shape in zip(pieces, self._kept, strict=True)]

    def _unit_of(self, misfits: Tensor) -> Tensor:
        return torch.where(misfits > 0, math.nan, 2.0**-self.range.fraction).float()


class SummedBucket(ExactBucket):
    """Gradients that are summed over the micro-batches of a rank before they are sent, as integers. The last element of
    `flat` counts gradients that do not fit."""

    def __init__(self, parameters: list[nn.Parameter], mesh: Mesh, settings: Settings, table: nn.Parameter | None):
        super().__init__(parameters, mesh, settings, table)
        self._group = mesh.group("shard" if self.ranks > 1 else "replicate", bool(own_axes_of(parameters[0])))
        self.flat = torch.zeros(sum(self.parts) + 1, dtype=torch.int64, device=mesh.device)
        self.sums, self._local = self.cut(self.flat), self.flat
        if self.ranks > 1:
            self._local = self.flat.new_zeros(self.ranks * sum(self.parts) + 1)
        pieces = self._local[:-1].split([self.ranks * part for part in self.parts])
        wholes = [p[: math.prod(shape)].view(shape) for p, shape in zip(pieces, self.shapes, strict=True)]
        self._by_rank = [piece.view(self.ranks, -1) for piece in pieces]
        self._sum = FixedPointSum(wholes, self._local[-1], self.range)
        self._second = FixedPointSum(wholes[-1:], self._local[-1], self.range) if self.tied else None
        self._work: dist.Work | None = None

    def take(self, gradients: list[Tensor], second: Tensor | None) -> None:
        if self.done == 1:
            self._local[-1].zero_()
        self._add(gradients, second)
        if self.done < self.passes or self._group is None:
            return
        if self.ranks == 1:
            self._work = dist.all_reduce(self.flat, group=self._group, async_op=True)
        else:
            counts = self._local[-1].expand(self.ranks, 1)
            whole = torch.cat([*self._by_rank, counts], dim=1).flatten()
            self._work = reduce_scatter_single(self.flat, whole, self._group, async_op=True)

    def _add(self, gradients: list[Tensor], second: Tensor | None) -> None:
        self._sum.add(gradients, first=self.done == 1)
        if second is not None and self._second is not None:
            self._second.add([second])

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()

    def unit(self) -> Tensor:
        return self._unit_of(self.flat[-1])


class KeptBucket(ExactBucket):
    """Gradients of the one or two micro-batches of the only process, which are kept until all are there, and then added
    up and rounded in one pass."""

    def __init__(self, parameters: list[nn.Parameter], mesh: Mesh, settings: Settings, table: nn.Parameter | None):
        super().__init__(parameters, mesh, settings, table)
        self.sums = self.cut(torch.zeros(sum(self.parts), dtype=torch.float32, device=mesh.device))
        self._addends: list[list[Tensor]] = [[] for _ in self.parameters]  # of each, `[elements]`

    def take(self, gradients: list[Tensor], second: Tensor | None) -> None:
        for addends, gradient in zip(self._addends, gradients, strict=True):
            addends.append(gradient.flatten())
        if second is not None:
            self._addends[-1].append(second.flatten())
        if self.done < self.passes:
            return
        for total, (own, *others) in zip(self.sums, self._addends, strict=True):
            whole = torch.stack([own, *others])[1:] if len(others) != 1 else others[0][None]
            add_rounded(own, whole, total.flatten(), self.range)
        self._addends = [[] for _ in self.parameters]

    def wait(self) -> None:
        pass


class ApartBucket(SummedBucket):
    """Gradients of parameters with axes of their own, which compute the tokens of all ranks along these axes, those of
    each rank by a use of its own: a use adds what the micro-batch of that rank adds on one process."""

    def __init__(self, parameters: list[nn.Parameter], mesh: Mesh, settings: Settings):
        super().__init__(parameters, mesh, settings, None)
        self._uses = math.prod(own_axes_of(parameters[0]).values())
        self._kept_addends: dict[nn.Parameter, list[Tensor]] = {}

    def divert_use(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
        """Keep the gradient of one use, and return None; of the last one of a pass return it."""
        kept = self._kept_addends.setdefault(parameter, [])
        if len(kept) + 1 == self._uses:
            return gradient
        kept.append(local_part(gradient, parameter))
        return None

    def _add(self, gradients: list[Tensor], second: Tensor | None) -> None:
        super()._add(gradients, second)
        kept, self._kept_addends = self._kept_addends, {}
        for addends in zip(*(kept[p] for p in self._computing), strict=True):
            self._sum.add(list(addends))


class CutBucket(ExactBucket):
    """Gradients that ZeRO cuts after each pass: they travel in the type in which backward made them, and the rank that
    keeps a part adds up those of all ranks, as integers where more passes follow."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        mesh: Mesh,
        settings: Settings,
        table: nn.Parameter | None,
        pieces: Pieces,
        rounds: bool,
    ):
        """rounds: whether the sums are rounded as they are made."""
        super().__init__(parameters, mesh, settings, table)
        self._pieces, self._rounds = pieces, rounds
        dtype = torch.float32 if self._rounds else torch.int64
        self.flat = torch.zeros(sum(self.parts), dtype=dtype, device=mesh.device)
        self.misfits = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self.sums = self.cut(self.flat)

    def take(self, gradients: list[Tensor], second: Tensor | None) -> None:
        self._pieces.wait()  # the memory of the last bucket is free when that of this one is taken
        rows = [self._by_rank(g, part) for g, part in zip(gradients, self.parts, strict=True)]
        sent = []
        if second is not None:
            sent.append(torch.stack([rows.pop(), self._by_rank(second, self.parts[-1])], dim=2))
        if rows:
            sent.insert(0, torch.cat(rows, dim=1))
        if self.done == 1:
            self.misfits.zero_()
        self._pieces.start(partial(self._send, sent, self.done == 1), sent)

    def _by_rank(self, gradient: Tensor, part: int) -> Tensor:
        """Return the parts of a gradient for the ranks, `[ranks, part]`."""
        flat = gradient.flatten()
        return nn.functional.pad(flat, (0, self.ranks * part - len(flat))).view(self.ranks, part)

    def _send(self, sent: list[Tensor], first: bool) -> None:
        """Add up what the ranks send: `[ranks, elements]`, and `[ranks, elements, 2]` of a table."""
        add = self._add_rounded if self._rounds else partial(self._add_integers, first)
        for whole, part in zip(sent, self.flat.split([whole.shape[1] for whole in sent]), strict=True):
            self._pieces.scatter(whole, part, add)

    def _add_integers(self, first: bool, own: Tensor, others: Tensor, out: Tensor, rank: int) -> None:
        add_integers(own, others, out, self.misfits, self.range, first)

    def wait(self) -> None:
        self._pieces.wait()

    def unit(self) -> Tensor | None:
        return None if self._rounds else self._unit_of(self.misfits)


class RoundedBucket(ExactBucket):
    """Gradients of the only micro-batch of a step, without ZeRO: each rank adds up a piece of those of all ranks, and
    sends the rounded sums to the others, in fp32. Those of a tied table travel side by side."""

    @staticmethod
    def lengths(parameters: list[nn.Parameter], table: nn.Parameter | None, ranks: int) -> list[int]:
        """Return the elements of the flat sums of a bucket: of parameters with one gradient, and of the table."""
        multiple = ranks * ALIGNED
        return [aligned(sum(p.numel() for p in kind), multiple) for kind in _kinds(parameters, table)]

    def __init__(
        self,
        parameters: list[nn.Parameter],
        mesh: Mesh,
        settings: Settings,
        table: nn.Parameter | None,
        pieces: Pieces,
        first: int,
    ):
        """first: where among the sums of `pieces` those of `lengths` begin."""
        super().__init__(parameters, mesh, settings, table)
        self._pieces, self._first = pieces, first
        self._sent: list[Tensor] = []  # of each kind, as the flat sums: `[elements, gradients]`
        self._places: list[Tensor] = []  # of each parameter's gradient
        self.sums = []
        for kind, total in zip(_kinds(self.parameters, table), pieces.sums[first:], strict=False):
            width = 2 if kind[0] is table else 1
            self._sent.append(torch.zeros(len(total), width, dtype=kind[0].dtype, device=mesh.device))
            begin = 0
            for p in kind:
                place = slice(begin, begin + p.numel())
                self.sums.append(total[place].view(p.shape))
                self._places.append(self._sent[-1][place, 0].view(p.shape))
                begin = place.stop

    def take(self, gradients: list[Tensor], second: Tensor | None) -> None:
        count = len(gradients) - self.tied
        if count:
            torch._foreach_copy_(self._places[:count], gradients[:count])
        if self.tied:
            self._places[-1].copy_(gradients[-1])
            other = self._sent[-1][: gradients[-1].numel(), 1]
            other.zero_() if second is None else other.copy_(second.flatten())
        self._pieces.start(self._send)

    def _send(self) -> None:
        for index, whole in enumerate(self._sent, self._first):
            own = self._pieces.sums[index].view(self._pieces.ranks, -1)[self._pieces.rank]
            self._pieces.scatter(whole, own, self._add_rounded)
            self._pieces.gather(index)

    def wait(self) -> None:
        self._pieces.wait()


def _kinds(parameters: list[nn.Parameter], table: nn.Parameter | None) -> list[list[nn.Parameter]]:
    """Return the parameters with one gradient, and the table, which has two; those of a kind that exist."""
    kinds = [p for p in parameters if p is not table], [p for p in parameters if p is table]
    return [kind for kind in kinds if kind]

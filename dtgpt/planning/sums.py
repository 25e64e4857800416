"""What sums of gradients take: bytes on a rank, and messages of a step. Each kind of sums has a class of these."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtgpt.config.execution import Settings
from dtgpt.models.roles import Role
from dtgpt.parallel.collectives import transport
from dtgpt.parallel.gradients import Buckets, choose_sums
from dtgpt.util import seams

Parameters = Sequence[Any]  # on a rank, by numbers of elements: `planning.parameters.LocalParameter`


@dataclass(frozen=True)
class Collective:
    """One kind of message of one rank in a step."""

    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all, send
    over: str  # the ranks that take part: dp (with cp where both hold the same weights), cp, ep, tp, pp
    what: str
    count: int
    bytes: int  # of all `count` together: of the whole tensor that is gathered, reduced or sent
    apart: int = 1  # neighbours among these ranks that have other tensors, and take part in other messages


def costs_of(settings: Settings) -> "Costs":
    """Return what the sums of a run take."""
    sums = choose_sums(settings)
    kind: Any = ScatteredCosts if settings.plan.zero else Costs
    if sums.costs:
        kind = seams.load(sums.costs)
    elif isinstance(sums, Buckets):
        kind = BucketCosts
    return seams.with_kinds("sum_costs", kind, settings)(sums)


def is_pushed(settings: Settings) -> bool:
    """Return whether a plan may expect that a faster transport gathers and scatters what ZeRO cuts."""
    plan = settings.plan
    alike = not settings.freezes_weights and not plan.own_axes  # all that ZeRO cuts is cut over the same ranks
    return alike and plan.shard > 1 and transport().reaches(plan.shard, plan.tp)


class Costs:
    """Of the `sums` of autograd.

    kept: whether they have memory of their own, from the beginning of a step on.
    scatters: whether `fully_shard` makes them, and sends gradients while backward goes on.
    words: what the type is called in which addends of several ranks are added.
    width, total_width: bytes of an element of the gradient that the optimizer gets, and of `Sums.totals`.
    """

    kept = False
    scatters = False
    words = "fp32"

    def __init__(self, sums: Any):
        self.sums, self.settings = sums, sums.settings
        self.total: torch.dtype = sums.total
        self.cuts: bool = sums.cuts
        # As narrow as the weights where replicas sent it so, and where a single micro-batch made it.
        several = self.settings.micro_batches > 1
        narrow = self.settings.low_precision and (self.settings.plan.data_ranks > 1 or not several)
        self.width = self.total_width = self.settings.dtype.itemsize if narrow else 4

    @property
    def scattered_width(self) -> int:
        """The bytes of an element of the gradients that `fully_shard` sends."""
        return self.sums.pushed_dtype.itemsize if is_pushed(self.settings) else 4

    def bytes_of(self, parameters: Parameters) -> int:
        """Return the bytes of these gradients and their sums on a rank."""
        return sum(self.width * (p.local if self.cuts else p.by_tp) for p in parameters)

    def bytes_at_once(self, parameters: Parameters) -> int:
        """Return the bytes of what is sent at the same time beside those, and of what arrives."""
        return 0

    def messages(self, parameters: Parameters, groups: int) -> list[Collective]:
        """Return the messages over replicas of a step, for the gradients of so many groups of parameters."""
        return []

    def addends_over_tp(self, parameters: Parameters) -> list[Any]:
        """Return the parameters that tensor-parallel ranks hold whole, and whose gradients they add up."""
        return [p for p in parameters if "tp" in p.layout.sums_over]

    def over_tp(self, found: list[Collective], rank: Any) -> list[Collective]:
        """Return the messages of a `planning.parameters.Rank` over tp for losses and activations: those `found`, the
        loss first, or what takes their place."""
        return found


class ScatteredCosts(Costs):
    """Of the sums of `fully_shard`, which reduces and scatters gradients under ZeRO."""

    scatters = True

    def messages(self, parameters: Parameters, groups: int) -> list[Collective]:
        plan, width = self.settings.plan, self.scattered_width
        reductions = self.settings.micro_batches if plan.zero >= 2 and plan.pp == 1 else 1
        words = "gradients, fp32" if width == 4 else "gradients, summed in fp32"
        size = width * sum(p.by_tp for p in parameters) * reductions
        return [Collective("reduce-scatter", "dp", words, groups * reductions, size)]


class BucketCosts(Costs):
    kept = True

    def bytes_of(self, parameters: Parameters) -> int:
        settings, plan = self.settings, self.settings.plan
        if plan.data_ranks > 1 and settings.low_precision:  # sent, received, and the sums of several micro-batches
            return round(sum(self._width_of(p.layout.axes["replicate"], p.apart) * p.by_tp for p in parameters))
        # A schedule that cuts backward in two has those of all passes on the parameters, too.
        return (2 if plan.splits_backward else 1) * super().bytes_of(parameters)

    def _width_of(self, replicas: int, apart: int) -> float:
        """Return the bytes of a 16-bit gradient that so many ranks sum, of which neighbours are `apart`."""
        settings = self.settings
        if replicas == 1:
            return 4.0
        copied = settings.device.type == "cuda" and transport().reaches(replicas, settings.plan.tp * apart)
        received = 1 - copied / replicas  # copy engines do not bring a rank what it has itself
        return (1 + received) * settings.dtype.itemsize + (4 if settings.micro_batches > 1 else 0)

    def messages(self, parameters: Parameters, groups: int) -> list[Collective]:
        size = self.width * sum(p.by_tp for p in parameters)
        if not self.settings.low_precision:
            return [Collective("all-reduce", "dp", "gradients, fp32", groups, size)]
        return [
            Collective("all-to-all", "dp", "gradients, pieces to sum", groups, size),
            Collective("all-gather", "dp", "gradients, the sums", groups, size),
        ]


class ExactCosts(BucketCosts):
    """Of sums of integers."""

    words = "64-bit integers"

    def __init__(self, sums: Any):
        super().__init__(sums)
        self.total_width = self.total.itemsize

    def bytes_of(self, parameters: Parameters) -> int:
        """Return the bytes of gradients in fp32, of what travels to be rounded, or of the integers: those of all that a
        rank computes with, where several micro-batches are summed before they are sent, and under ZeRO its part's."""
        plan, total = self.settings.plan, 4 * sum(p.local for p in parameters)
        apart, together = ([p for p in parameters if (p.apart > 1) is own] for own in (True, False))
        total += 8 * sum(p.by_tp + (p.local if p.layout.axes["shard"] > 1 else 0) for p in apart)
        if self.sums.rounds:
            return total + (0 if plan.zero else self._bytes_to_sum(together))
        if self.sums.keeps and not plan.zero:
            return total + self.settings.dtype.itemsize * sum(p.by_tp for p in together)
        numbers = sum((0 if self.cuts else p.by_tp) + (p.local if plan.shard > 1 else 0) for p in together)
        return total + self.total_width * numbers

    def bytes_at_once(self, parameters: Parameters) -> int:
        """Return the bytes of what is sent, and arrives, of a block or the rest of a stage."""
        from dtgpt.parallel.shared_memory.scatter import CopyScatter  # of these sums alone

        plan = self.settings.plan
        ranks = plan.data_ranks
        if ranks == 1:
            return 0
        sizes = Counter[int | None]()
        for p in parameters:
            sizes[p.block] += p.by_tp if p.apart == 1 else 0
        largest = max(sizes.values())
        if not (self.cuts or self.sums.rounds):
            return largest * self.total_width if plan.zero else 0
        ends = self._bytes_to_sum([p for p in parameters if p.block is None])
        sent = max(largest * self.settings.dtype.itemsize, ends)
        arriving = CopyScatter.bytes(sent // ranks, ranks) if transport().reaches(ranks, plan.tp) else sent
        return arriving + (sent if plan.zero else 0)

    def messages(self, parameters: Parameters, groups: int) -> list[Collective]:
        plan, passes = self.settings.plan, self.settings.micro_batches
        whole, apart = sum(p.by_tp for p in parameters), any(p.apart > 1 for p in parameters)
        if plan.zero and (apart or not self.cuts):
            return [Collective("reduce-scatter", "dp", f"gradients, {self.words}", groups, self.total_width * whole)]
        if apart or not (plan.zero or self.sums.rounds):
            return [Collective("all-reduce", "dp", f"gradients, {self.words}", groups, self.total_width * whole)]
        size = self._bytes_to_sum(parameters) * passes
        pieces = Collective("all-to-all", "dp", "gradients, pieces to sum", groups * passes, size)
        if plan.zero:
            return [pieces]
        return [pieces, Collective("all-gather", "dp", "gradients, the sums in fp32", groups, 4 * whole)]

    def _bytes_to_sum(self, parameters: Parameters) -> int:
        """Return the bytes of the gradients that travel to be summed: of a tied table those of both uses, which one
        stage has."""
        tied = self.settings.model.tied
        return sum((2 if tied and p.role is Role.VOCABULARY else 1) * self.width * p.by_tp for p in parameters)

"""Where a rank stands in a plan. Ranks are ordered (pp, dp, cp, tp) with tp fastest: the ranks that exchange most are
neighbours on one node."""

import math
from dataclasses import dataclass

from dtgpt.config.plan import ResolvedPlan


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

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Pairs of a stage on another rank and the stage beside it on this rank: over each goes an activation, and its
        gradient comes back."""
        pairs = [(beside, stage) for stage in self.stages for beside in (stage - 1, stage + 1)]
        return [(beside, stage) for beside, stage in pairs if self.rank_of(beside) is not None]

    def neighbour(self, pp: int) -> int:
        """Return the rank with the same dp, cp and tp coordinates on pipeline rank `pp`."""
        return self.rank + (pp - self.pp) * self.plan.ranks_of_stage


def chunk(whole: range, pieces: int, index: int) -> range:
    """Return piece `index` of a range cut as torch.chunk does: pieces of equal size, the last ones shorter or empty."""
    size = math.ceil(len(whole) / pieces)
    return whole[index * size : (index + 1) * size]

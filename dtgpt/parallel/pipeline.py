"""Pipeline parallelism: cut the model into stages by cost, and run them through `torch.distributed.pipelining`.

Schedules: GPipe (Huang et al. 2019), 1F1B and Interleaved1F1B (Narayanan et al. 2021), ZBV (Qi et al. 2024). Stage
edges carry contiguous local tensors of a fixed shape, which the torch versions from 2.11 on all understand.
"""

from contextlib import nullcontext
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from dtgpt.data.end_of_document import Marks
from dtgpt.model import GPT, GPTConfig
from dtgpt.ops.fast import parameters_apart
from dtgpt.parallel.data import reshard
from dtgpt.parallel.graphs import Graphs
from dtgpt.parallel.passes import PLAIN, Passes
from dtgpt.parallel.plan import Plan
from dtgpt.parallel.shards import Shards

ONE_STAGE = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
MANY_STAGES = {"Interleaved1F1B": ScheduleInterleaved1F1B, "ZBVZeroBubble": ScheduleZBVZeroBubble}
EMBEDDING_COST = 0.05  # of a block's: a lookup, a sum and a dropout, all bound by memory


def block_ranges(config: GPTConfig, plan: Plan) -> list[range]:
    """The blocks of each stage: as the plan says, or so that the costliest stage is as cheap as can be."""
    sizes = plan.blocks_per_stage or balanced_cut(config, plan.num_stages)
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [range(first, first + size) for first, size in zip(firsts, sizes, strict=True)]


@cache
def balanced_cut(config: GPTConfig, stages: int) -> tuple[int, ...]:
    """Blocks per stage, at least one each. Cost is in FLOPs of a token; the head counts on the last stage, the
    embedding on the first. Among cuts with the same costliest stage, the one with the most even rest."""
    h, length = config.hidden_size, config.seq_length
    block = 6 * 12 * h * h + 12 * h * length
    head = 6 * h * config.padded_vocab_size / block

    def cost(stage: int, blocks: int) -> float:
        return blocks + EMBEDDING_COST * (stage == 0) + head * (stage == stages - 1)

    @cache
    def best(stage: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        """(largest cost, sum of squares, cut) of the stages from `stage` on with `left` blocks."""
        if stage == stages - 1:
            return cost(stage, left), cost(stage, left) ** 2, (left,)
        choices = []
        for blocks in range(1, left - (stages - stage - 1) + 1):
            largest, squares, cut = best(stage + 1, left - blocks)
            here = cost(stage, blocks)
            choices.append((max(here, largest), here**2 + squares, (blocks, *cut)))
        return min(choices)

    return best(0, config.num_layers)[2]


def keep_stage(model: GPT, stage: int, plan: Plan) -> GPT:
    """Remove from a whole model (on the meta device) all but one stage."""
    blocks = block_ranges(model.config, plan)[stage]
    model.keep(blocks, embedding=stage == 0, head=stage == plan.num_stages - 1)
    return model


class Stage(PipelineStage):
    """A stage whose neighbour may be on the same rank, as at the turn of ZBV. Before the first step torch greets every
    neighbour, and gloo of torch 2.11 fails where a rank greets itself."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


class Pipeline(Passes):
    """The stages of this rank in a schedule, which is one piece of graph."""

    def __init__(
        self,
        stages: list[GPT],
        shards: Shards,
        graphs: Graphs,
        micro_batch_size: int,
        micro_batches: int,
        dtype: torch.dtype,
    ):
        self.modules, self.shards, self.graphs, self.dtype = stages, shards, graphs, dtype
        self.mesh, self.micro_batch_size = shards.mesh, micro_batch_size
        plan, config = self.mesh.plan, stages[0].config
        self.edge = config.seq_length // (plan.tp if plan.sequence_parallel else 1), config.hidden_size
        self.schedule = self._make_schedule(micro_batches)

    def _make_schedule(self, micro_batches: int) -> PipelineScheduleSingle | PipelineScheduleMulti:
        mesh, plan, config = self.mesh, self.mesh.plan, self.modules[0].config
        tokens = torch.empty(self.micro_batch_size, config.seq_length, dtype=torch.int64, device="meta")
        edge = torch.empty(self.micro_batch_size, *self.edge, dtype=self.dtype, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        stages = [
            Stage(
                module, index, plan.num_stages, mesh.device, group=mesh.pp_group,
                input_args=(tokens if index == 0 else edge,),
                output_args=(loss if index == plan.num_stages - 1 else edge,),
            )
            for index, module in zip(mesh.place.stages, self.modules, strict=True)
        ]  # fmt: skip
        # The last stage is given its targets and makes the loss itself.
        options = {"n_microbatches": micro_batches, "loss_fn": lambda loss, _: loss, "scale_grads": False}
        if plan.schedule in ONE_STAGE:
            return ONE_STAGE[plan.schedule](stages[0], **options)
        return MANY_STAGES[plan.schedule](stages, **options)

    def expect(self, micro_batches: int) -> None:
        self.schedule = self._make_schedule(micro_batches)
        if self.shards.buckets is not None:
            self.shards.buckets.expect(micro_batches)

    def gradients(self, micro_batches: int, windows: Tensor, keys: Tensor | None, marks: Marks = PLAIN) -> Tensor:
        return self.graphs.run("schedule", self._run_schedule, windows, keys, *marks)

    def _run_schedule(self, windows: Tensor, keys: Tensor | None, *marks: Tensor | None) -> Tensor:
        if self.shards.buckets is not None:
            self.shards.buckets.begin()
        place, losses = self.mesh.place, []
        inputs = [windows[:, :-1].contiguous()] if place.holds_first else []
        given = {"keys": keys, **Marks(*marks)._asdict()}
        more = {name: tensor for name, tensor in given.items() if tensor is not None}
        if place.holds_last:
            targets = windows[:, 1:].contiguous()
            more |= {"targets": targets, "target": targets, "losses": losses}
        with parameters_apart() if self.mesh.plan.splits_backward else nullcontext():
            self.schedule.step(*inputs, return_outputs=False, **more)
        self.shards.take_gradients()
        return torch.stack(losses).detach().mean() if losses else torch.zeros((), device=self.mesh.device)

    def logits(self, tokens: Tensor) -> Tensor | None:
        return self._stages_in_turn(tokens)

    def mean_loss(self, tokens: Tensor, targets: Tensor, marks: Marks = PLAIN) -> Tensor | None:
        return self._stages_in_turn(tokens, targets, marks)

    @torch.no_grad()
    def _stages_in_turn(self, tokens: Tensor, targets: Tensor | None = None, marks: Marks = PLAIN) -> Tensor | None:
        """Each rank meets its sends and receives by depth, so that none waits in a circle."""
        place, x = self.mesh.place, tokens
        for index, module in zip(place.stages, self.modules, strict=True):
            source, target = place.comes_from(index), place.goes_to(index)
            if source is not None:
                x = torch.empty(len(tokens), *self.edge, dtype=self.dtype, device=self.mesh.device)
                dist.recv(x, place.neighbour(source), group=self.mesh.pp_group)
            x = module(x, None, targets, *marks)
            if target is not None:
                dist.send(x.contiguous(), place.neighbour(target), group=self.mesh.pp_group)
        reshard(*self.modules)
        return x if place.holds_last else None

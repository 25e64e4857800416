"""Pipeline parallelism through `torch.distributed.pipelining`: torch orders the passes, the stages here run them.

Orders of passes such as zero bubble are long, and torch has them right; what it lacks is here. Its stages would keep a
buffer for every micro-batch of a step, send messages to their own rank, and hold what they have handed over until the
next step; `Stage` does not.

Schedules: GPipe (Huang et al. 2019), 1F1B and Interleaved1F1B (Narayanan et al. 2021), ZBV (Qi et al. 2024). Stage
edges carry contiguous local tensors of a fixed shape, which the torch versions from 2.11 on all understand.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from dtgpt.config.execution import Settings
from dtgpt.models.batch import Batch
from dtgpt.models.decoder import Decoder
from dtgpt.ops.operation import split_backward
from dtgpt.parallel.collectives import Edges, transport
from dtgpt.parallel.engine import NO_TIMERS, Graphs, Timers, TrainingEngine, orderless_mean, reshard
from dtgpt.parallel.shards import Shards
from dtgpt.parallel.stages import places_of_edge, run_in_turn


class Stage(PipelineStage):
    """A stage with timers, whose neighbour may be on the same rank, as at the turn of ZBV. Before the first step torch
    exchanges a message with every neighbour, and gloo of torch 2.11 fails where a rank sends to itself.

    Micro-batches receive in `places`, which they use in turn: torch would keep a buffer for each of a step, in GPT-3
    more than a GPU has. Where a faster transport carries the messages, its own kind of stage takes this one's place.
    """

    timers = NO_TIMERS
    places = 1  # of each edge

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.timers.measure("forward"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.timers.measure("backward"):
            result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._forget(self.args_recv_info, self.stage_index - 1, bwd_chunk_id)
        self._forget(self.grad_recv_info, self.stage_index + 1, bwd_chunk_id)
        return result

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.timers.measure("backward"):
            return super().backward_weight_one_chunk(*args, **kwargs)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._buffers_on_meta():
            result = super()._prepare_forward_infra(*args, **kwargs)
        self._take_places(self.args_recv_info, self.stage_index - 1)
        return result

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._buffers_on_meta():
            result = super()._prepare_backward_infra(*args, **kwargs)
        self._take_places(self.grad_recv_info, self.stage_index + 1)
        return result

    @contextmanager
    def _buffers_on_meta(self) -> Iterator[None]:
        """Let torch describe the buffers that it would allocate here, for all micro-batches of a step."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _take_places(self, infos: dict[int, tuple[Any, ...]], source: int) -> None:
        """Allocate the places of the edge from `source`, if there is one, and let torch receive each micro-batch in
        one: another tensor for each, since it is a leaf of autograd's graph."""
        if not self._receives(source):
            return
        like = infos[0][0].buffer  # None in versions of torch that allocate what they receive when it comes
        places = [] if like is None else [torch.empty_like(like, device=self.device) for _ in range(self.places)]
        for micro_batch, (info,) in infos.items() if places else ():
            place = places[micro_batch % self.places]
            info.buffer = place.detach().requires_grad_(source < self.stage_index)

    def _forget(self, infos: dict[int, tuple[Any, ...]], neighbour: int, micro_batch: int) -> None:
        """Let go of what a stage of this rank handed over directly, which torch would keep until the next step."""
        if 0 <= neighbour < self.num_stages and not self._receives(neighbour):
            for info in infos[micro_batch]:
                info.buffer = torch.empty(0, device=self.device)

    def _receives(self, neighbour: int) -> bool:
        """Return whether what comes from a stage comes from another rank."""
        inside = 0 <= neighbour < self.num_stages
        return inside and self.stage_index_to_group_rank[neighbour] != self.group_rank

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


class PipelineEngine(TrainingEngine):
    """The stages of this rank in a schedule, which is one graph."""

    def __init__(self, stages: list[Decoder], shards: Shards, graphs: Graphs, settings: Settings, timers: Timers):
        self.modules, self.shards, self.graphs, self.settings = stages, shards, graphs, settings
        self.timers = NO_TIMERS if graphs.enabled else timers  # a replay is not divided
        self.mesh, plan, config = shards.mesh, settings.plan, settings.model
        self.edge = settings.local_length // (plan.tp if plan.sequence_parallel else 1), config.hidden_size
        self.edges = self._open_edges(settings.micro_batches)
        self.schedule = self._make_schedule(settings.micro_batches)

    def _open_edges(self, micro_batches: int) -> Edges | None:
        shape = self.settings.micro_batch_size, *self.edge
        return transport().open_edges(
            self.settings, self.mesh, shape, places_of_edge(self.settings.plan, micro_batches)
        )

    def _make_schedule(self, micro_batches: int) -> PipelineScheduleSingle | PipelineScheduleMulti:
        mesh, plan, size = self.mesh, self.settings.plan, self.settings.micro_batch_size
        tokens = torch.empty(size, self.settings.local_length, dtype=torch.int64, device="meta")
        edge = torch.empty(size, *self.edge, dtype=self.settings.dtype, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        make_stage: Callable[..., Any] = Stage if self.edges is None else self.edges.make_stage
        stages: list[Any] = []
        for index, module in zip(mesh.place.stages, self.modules, strict=True):
            stage = make_stage(
                module,
                index,
                plan.num_stages,
                mesh.device,
                group=mesh.pp_group,
                input_args=(tokens if index == 0 else edge,),
                output_args=(loss if index == plan.num_stages - 1 else edge,),
            )
            stage.timers, stage.places = self.timers, places_of_edge(plan, micro_batches)
            stages.append(stage)
        # The last stage gets its targets and computes the loss itself.
        schedule = get_schedule_class(plan.schedule)
        given = stages[0] if issubclass(schedule, PipelineScheduleSingle) else stages
        return schedule(given, micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)

    def expect(self, micro_batches: int) -> None:
        super().expect(micro_batches)
        if self.edges is not None and places_of_edge(self.settings.plan, micro_batches) > self.edges.places:
            self.edges = self._open_edges(micro_batches)  # of interleaved rounds that are longer
        self.schedule = self._make_schedule(micro_batches)

    def gradients(self, micro_batches: int, batch: Batch) -> Tensor:
        return self.graphs.run("schedule", self._run_schedule, *batch)

    def _run_schedule(self, *fields: Tensor | None) -> Tensor:
        self.shards.sums.begin()
        if self.edges is not None:
            self.edges.begin()
        batch, place = Batch._make(fields), self.mesh.place
        # Contiguous: the stages of torch 2.11 compare the layout of their inputs with that of `input_args`.
        inputs = [batch.tokens.contiguous()] if place.holds_first else []
        losses: list[Tensor] = []
        more: dict[str, Any] = batch.beside_tokens
        targets = more.pop("targets")
        if place.holds_last:
            # `target` and `losses` are torch's; `targets` go on to the last stage, which computes the loss itself.
            more |= {"targets": targets, "target": targets, "losses": losses}
        with split_backward() if self.settings.plan.splits_backward else nullcontext():
            self.schedule.step(*inputs, return_outputs=False, **more)
        if self.edges is not None:
            self.edges.end()
        self.shards.take_gradients()
        if losses and self.shards.sums.orderless:
            return orderless_mean(torch.stack(losses), len(losses), self.shards)
        return torch.stack(losses).detach().mean() if losses else torch.zeros((), device=self.mesh.device)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor | None:
        result = run_in_turn(self.modules, self.mesh, batch, self.settings.dtype)
        reshard(*self.modules)
        return result

"""From the plain model to what this rank holds of it: model on meta -> cut into stages -> BUILD -> memory -> initial
weights.

Memory comes last but for the values, since the whole model may be larger than the device. BUILD is a list, and no
sequence of conditions, because the order is what goes wrong: each deed relies on those before it, and a capability can
say behind which its own belongs.

BUILD lists what is done to a stage, in an order that matters:

* tensor parallelism first: all that follows sees the modules that a rank computes with, and ZeRO cuts what is left.
* added modules, such as adapters, are cut by themselves, along what they stand beside.
* attention: the back end of each core. What a capability runs again in backward of a core comes before, and what sends
  messages around a core behind, so that they are not sent again.
* ZeRO last: its hooks run around a block, and gather its weights once. Right before come recomputation, around all that
  a block does but for what it keeps, and compilation, of the whole block with what is computed again.

Capabilities add entries (`seams`), each beside the one that it names.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from dtgpt.config.execution import Settings
from dtgpt.config.plan import ResolvedPlan
from dtgpt.models.binding import bind, on_meta
from dtgpt.models.decoder import Decoder
from dtgpt.models.inventory import attention_cores
from dtgpt.models.layers import Output
from dtgpt.parallel.collectives import Collectives, transport
from dtgpt.parallel.engine import NO_TIMERS, Graphs, SingleStageEngine, Timers, TrainingEngine
from dtgpt.parallel.gradients import choose_sums
from dtgpt.parallel.mesh import Mesh, RankCoordinates
from dtgpt.parallel.shards import Shards
from dtgpt.parallel.stages import keep_stage
from dtgpt.util import seams

# What a plan alone needs is imported where the plan has it: DTensor, torch's pipelines and its compiler take a second.
if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dtgpt.parallel.tensor import Table


@dataclass(frozen=True)
class Building:
    """What a stage is built for. masters: False for inference. table: styles of tensor parallelism; None: those of the
    plan. peers: what gathers and sums activations over tp; None: torch.distributed."""

    settings: Settings
    mesh: Mesh
    masters: bool = True
    table: "Table | None" = None
    peers: Collectives | None = None


class Entry(NamedTuple):
    """Something that is done to a stage on the meta device.

    when: for which building.
    after: the entry behind which a capability's comes. before: the one right before which it comes instead.
    runs: whether it says how modules run, and can be done again.
    """

    name: str
    when: Callable[[Building], bool]
    deed: Callable[[Decoder, Building], None]
    after: str = ""
    before: str = ""
    runs: bool = False


def build_stages(
    settings: Settings, mesh: Mesh, key: Tensor | None, masters: bool = True, table: "Table | None" = None
) -> tuple[list[Decoder], Shards]:
    """Return the pipeline stages of this rank, one without a pipeline, and their shards. No rank holds more than its
    shards at any time. Where other modules than the model's own are trained, the shards are theirs, and `frozen` those
    of the model.

    No `key`: the memory is left as it is, for a checkpoint to fill. No `masters`: for inference. `table`: styles of
    tensor parallelism; None: those of the plan."""
    # Ranks open what they share in the same order, or they would wait for each other: here, and in `make_engine`.
    sums = choose_sums(settings) if masters else None
    peers = transport().open_collectives(settings, mesh) if masters and mesh.tp_group else None
    building = Building(settings, mesh, masters, table, peers)
    stages = [lay_out_stage(building, stage) for stage in mesh.place.stages]
    gathered: dict[nn.Parameter, Tensor] = {}
    for stage in stages:
        stage.allocate(mesh.device)  # not before all is cut: the whole model may be larger than the device
        if settings.plan.zero and sums and not settings.freezes_weights and not settings.plan.own_axes:
            gathered |= transport().open_shards(stage, mesh, settings.dtype, sums.pushed_dtype)
    shards = Shards(stages, mesh, masters, gathered, sums, settings.dtype)
    if settings.freezes_weights:
        shards.frozen = Shards(stages, mesh, masters=False, trained=False)
    if key is not None:
        (shards.frozen or shards).initialize(settings.model, key)
    return stages, shards


def lay_out_stage(building: Building, stage: int) -> Decoder:
    """Return one stage on the meta device, as BUILD makes it."""
    settings = building.settings
    narrows = settings.plan.narrows_weights or not building.masters or settings.freezes_weights
    dtype = settings.dtype if narrows else torch.float32
    with on_meta():
        part = keep_stage(Decoder(settings.model, settings.dtype), stage, settings.plan).to(dtype)
    build(part, building)
    return part


def build(part: Decoder, building: Building, again: bool = False) -> None:
    """Do to a stage what BUILD says. again: only how its modules run, but for what compiles them."""
    for entry in entries(building):
        if entry.when(building) and (entry.runs or not again):
            entry.deed(part, building)


def entries(building: Building) -> list[Entry]:
    """Return BUILD with the entries of capabilities."""
    found = list(BUILD)
    for entry in seams.listed("build", building):
        names = [one.name for one in found]
        found.insert(names.index(entry.before) if entry.before else names.index(entry.after) + 1, entry)
    return found


def cut_over_tp(part: Decoder, building: Building) -> None:
    from dtgpt.parallel.tensor import apply_table, make_table

    settings, table = building.settings, building.table
    if table is None:
        table = make_table(settings.model, settings.plan, settings.local_length, building.peers)
        for adapt in seams.listed("tp_tables", building):
            table = adapt(table, building)
    apply_table(part, building.mesh.devices["tp"], table)


def add_modules(part: Decoder, building: Building) -> None:
    add_trained(part, building.settings, building.mesh.place, building.mesh.device)


def add_trained(part: Decoder, settings: Settings, place: RankCoordinates, device: torch.device) -> None:
    """Freeze what is there of a model, and add what capabilities train beside it. device: of the run."""
    part.requires_grad_(False)
    for add in seams.listed("added_modules"):
        add(part, settings, place, device)


def set_attention(part: Decoder, building: Building) -> None:
    """Give the attention cores their back end."""
    for core in (core for block in part.blocks.values() for core in attention_cores(block)):
        bind(core, backend=building.settings.attention)


def shard_over_data(part: Decoder, mesh: Mesh, dtype: torch.dtype) -> None:
    """Wrap each block, then the whole part. What is not in a block stays whole from the forward pass on, also by
    ZeRO-3: backward begins with the head."""
    for module in (*part.blocks.values(), part):
        shard_module(module, mesh.devices["shard"], dtype, mesh.plan.reshards and module is not part)


def shard_module(module: nn.Module, ranks: "DeviceMesh", dtype: torch.dtype, reshards: bool) -> None:
    """Wrap a module but for what is wrapped in it. Weights are all-gathered in `dtype`, in which they compute;
    gradients are reduce-scattered in fp32. reshards: whether weights are freed between forward and backward."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Torch warns of writing in place into what a wrapped module returns; nothing here does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    sharded = fully_shard(module, mesh=ranks, mp_policy=policy, reshard_after_forward=reshards)
    # Gradients are summed, not averaged: the loss already counts a micro-batch by its fraction of the global batch.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


BUILD = (
    Entry("tensor parallelism", lambda made: made.settings.plan.tp > 1, cut_over_tp),
    Entry("added modules", lambda made: made.settings.freezes_weights, add_modules),
    Entry("attention", lambda made: True, set_attention, runs=True),
    Entry(
        "ZeRO",
        lambda made: made.settings.plan.zero > 0,
        lambda part, made: shard_over_data(part, made.mesh, made.settings.dtype),
    ),
)


def make_engine(
    stages: list[Decoder], shards: Shards, settings: Settings, graphs: Graphs, timers: Timers = NO_TIMERS
) -> TrainingEngine:
    """Return what runs forward and backward under the plan. Without graphs, `timers` measure them."""
    shards.sums.open(stages, shards.mesh)  # before the first backward pass, whose gradients it takes by hooks
    if settings.plan.pp == 1:
        return SingleStageEngine(stages[0], shards, graphs, timers)
    from dtgpt.parallel.pipeline import PipelineEngine

    return PipelineEngine(stages, shards, graphs, settings, timers)


def scale_gradients(stages: list[Decoder], scale: Tensor | None) -> None:
    """Let the output layer multiply the gradient of its loss by the scalar `scale`, read at each pass; None: by 1."""
    for module in (module for stage in stages for module in stage.modules()):
        if isinstance(module, Output):
            bind(module, gradient_scale=scale)


def micro_batch_weight(micro_batches: int, plan: ResolvedPlan) -> float:
    """Return what the gradient of one micro-batch's mean loss counts in the sum over all: the same under every plan, so
    that 16-bit gradients are of the same size, too."""
    return 1 / (micro_batches * plan.data_ranks)

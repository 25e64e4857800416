"""The stages of a model for inference, where tensor parallelism cuts plain tensors.

Parameters are DTensors while weights are loaded, since shards are read by their placements. `localize` then replaces
them by this rank's local tensors, and sums over the tp ranks by itself where a module needs it: a step of one token is
too short for the dispatch of DTensor.
"""

from collections.abc import Callable
from functools import partial
from operator import mul
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from dtgpt.config.execution import Settings
from dtgpt.config.plan import Plan
from dtgpt.models.binding import bind, bound_of
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.roles import Role, role_of
from dtgpt.parallel.build import build_stages
from dtgpt.parallel.layout import chunk
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shards
from dtgpt.util.errors import UserError
from dtgpt.util.torch_private import is_dtensor

if TYPE_CHECKING:
    from dtgpt.parallel.tensor import Table


def inference_table(config: ModelConfig, plan: Plan) -> "Table":
    """Return the table of tensor parallelism for stages that `localize` follows. Raise UserError where the plan has
    styles of its own."""
    if plan.table:
        raise UserError(
            f"the plan's table has styles of its own for {', '.join(plan.table)}, but inference cuts models by roles "
            "alone; leave the table out of this plan"
        )
    if plan.tp == 1:
        return {}
    from dtgpt.parallel.local_weights.dims import dims_of  # DTensor takes a second to import
    from dtgpt.parallel.tensor import Partition, default_table

    styles = default_table(config, sequence_parallel=False, seq_length=config.seq_length, peers=None)
    return {pattern: Partition(**dims) for pattern, style in styles.items() if (dims := dims_of(style))}


def inference_stages(settings: Settings, mesh: Mesh, fill: Callable[[Shards], None]) -> list[Decoder]:
    """Return the pipeline stages of this rank for inference, with the weights that `fill` gives their shards."""
    table = inference_table(settings.model, settings.plan)
    stages, shards = build_stages(settings, mesh, key=None, masters=False, table=table)
    fill(shards)
    for stage in stages:
        localize(stage, mesh)
    return stages


def localize(stage: Decoder, mesh: Mesh) -> None:
    """Replace the parameters of `stage`, cut by `inference_table`, by their local tensors. Its forward then takes and
    returns what that of the whole stage does, but the head returns this rank's columns of the logits. To be called when
    the weights are loaded; a plan without tensor parallelism is left alone."""
    roles, group = stage.config.roles, mesh.tp_group
    if group is None:
        return
    for name, module in stage.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if is_dtensor(parameter):
                module.register_parameter(key, nn.Parameter(parameter.to_local().detach()))
        role = role_of(name, roles)
        if role in (Role.ROW, Role.EXIT):
            add = bound_of(module).over_ranks or partial(_summed, group)
            module.register_forward_hook(lambda module, inputs, addend, add=add: add(addend))
        elif role is Role.ROW_STACK and bound_of(module).product is None:
            bind(module, through=partial(mul, float(mesh.place.tp == 0)))  # one rank adds the biases
        elif role is Role.JOINT_NORM:
            bind(module, sum_of_heads=partial(_summed, group))
        elif role is Role.VOCABULARY:
            rows = chunk(range(stage.config.padded_vocab_size), mesh.plan.tp, mesh.place.tp)
            lookup = _Lookup(rows, group)
            module.register_forward_pre_hook(lookup.before)
            module.register_forward_hook(lookup.after)
    stage.tie_weights()


def _summed(group: dist.ProcessGroup, addend: Tensor) -> Tensor:
    dist.all_reduce(addend, group=group)
    return addend


class _Lookup:
    """Hooks of an embedding that has `rows` of its table: the sum over the ranks is exact, since a rank adds zero for
    ids that are not in its rows."""

    def __init__(self, rows: range, group: dist.ProcessGroup):
        self._rows, self._group = rows, group
        self._elsewhere: Tensor | None = None  # between the two hooks: bool `[B, T]`, ids of other ranks

    def before(self, module: nn.Module, inputs: Any) -> Tensor:
        """Return the ids `[B, T]` as rows of this rank's part, the first one for those of other ranks."""
        local = inputs[0] - self._rows.start
        self._elsewhere = (local < 0) | (local >= len(self._rows))
        return local.masked_fill(self._elsewhere, 0)

    def after(self, module: nn.Module, inputs: Any, found: Tensor) -> Tensor:
        """Return the embeddings `[B, T, H]`, whole on every rank."""
        assert self._elsewhere is not None
        found = found.masked_fill(self._elsewhere[..., None], 0)
        self._elsewhere = None
        dist.all_reduce(found, group=self._group)
        return found

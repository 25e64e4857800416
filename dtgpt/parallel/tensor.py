"""Tensor and sequence parallelism: a table {module pattern: style} for `parallelize_module`.

A model could have modules for tensor parallelism in it. Then it would have to be written for a plan; with a table, a
plan says what it does to plain modules, by their roles, and a new architecture has tensor parallelism without a line.
torch's styles are used where they fit. Ours sum a bias once, behind the sum over the ranks, and send activations by
`Collectives`, for which there are faster kernels. Tensors between modules are local so that norms, kernels and dropout
run as on one process.

The cut is Megatron-LM's (Shoeybi et al. 2019; sequence parallelism: Korthikanti et al. 2022): the first matrix of a
pair by columns, the second by rows, the token table and the logits over the vocabulary. Between modules there are
local tensors; inside a module of the table, weights and activations are DTensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from dtgpt.config.plan import Plan
from dtgpt.models.binding import bind, exchanges
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.roles import Role, matches
from dtgpt.parallel.collectives import Collectives, GroupCollectives
from dtgpt.util import seams


def dim_of(placement: Placement) -> int | None:
    """Return the dimension along which a tensor is cut; None where each rank has it whole."""
    return placement.dim if isinstance(placement, Shard) else None


@dataclass(frozen=True)
class ActivationLayout:
    """How activations lie on the tp ranks between two pairs of matrices: each rank has them whole (`Replicate`), or its
    part (`Shard`). `peers`: what gathers and sums them faster, where it takes them."""

    mesh: DeviceMesh
    placement: Placement
    peers: Collectives | None

    @property
    def cut(self) -> bool:
        """Whether each rank has its part."""
        return dim_of(self.placement) is not None

    def gather(self, part: Tensor) -> Tensor:
        """Return the activations that each rank has whole, from each rank's own; without a gradient."""
        dim, shape = dim_of(self.placement), [*part.shape]
        if dim is not None:
            shape[dim] *= self.mesh.size()
        return self._collectives(shape, part.itemsize).gather(part, dim)

    def sum(self, whole: Tensor) -> Tensor:
        """Return the sum of the ranks' `whole`, of which each rank gets its own; without a gradient. The sum that all
        ranks keep may take the place of its addend."""
        return self._collectives([*whole.shape], whole.itemsize).sum(whole, dim_of(self.placement))

    def _collectives(self, whole: list[int], itemsize: int) -> Collectives | GroupCollectives:
        fits = self.peers and self.peers.takes(whole, dim_of(self.placement), itemsize)
        return self.peers if self.peers and fits else GroupCollectives(self.mesh.get_group())


def sum_parts(part: Tensor, layout: ActivationLayout) -> Tensor:
    """Return `layout.sum(part)`; backward, the gradient that each rank has whole."""
    if torch.compiler.is_compiling():
        addend = DTensor.from_local(part, layout.mesh, [Partial()], run_check=False)
        return addend.redistribute(layout.mesh, [layout.placement]).to_local()
    return _Sum.apply(part, layout)


def whole_input(x: Tensor, layout: ActivationLayout) -> DTensor:
    """Return a local activation as a DTensor that each rank has whole."""
    if torch.compiler.is_compiling():
        part = DTensor.from_local(x, layout.mesh, [layout.placement], run_check=False)
        return part if layout.placement.is_replicate() else part.redistribute(layout.mesh, [Replicate()])
    return _Whole.apply(x, layout)


def sum_rows(rows: DTensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    """Return the sum of what the ranks found of a table that is cut by rows, laid out by `placement`."""
    if torch.compiler.is_compiling():
        return rows.redistribute(mesh, [placement]).to_local()
    return _SumRows.apply(rows, mesh, placement)


class _Sum(torch.autograd.Function):
    """All-reduce or reduce-scatter, forward; the identity or an all-gather, backward."""

    @staticmethod
    def forward(ctx, part: Tensor, layout: ActivationLayout) -> Tensor:
        ctx.layout = layout
        return layout.sum(part)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.layout.gather(grad), None


class _SumRows(torch.autograd.Function):
    """The sum over the ranks of embeddings that each looked up in its rows of the table, a DTensor; an all-gather of
    their gradient, backward."""

    @staticmethod
    def forward(ctx, rows: DTensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
        ctx.mesh, ctx.dim = mesh, dim_of(placement)
        return rows.redistribute(mesh, [placement]).to_local()

    @staticmethod
    def backward(ctx, grad: Tensor):
        whole = GroupCollectives(ctx.mesh.get_group()).gather(grad, ctx.dim)
        return DTensor.from_local(whole, ctx.mesh, [Replicate()], run_check=False), None, None


class _Whole(torch.autograd.Function):
    """A local activation as a DTensor that each rank has whole, by an all-gather where it is a part; backward, the sum
    of the gradients of the ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, layout: ActivationLayout) -> DTensor:
        ctx.layout = layout
        return DTensor.from_local(layout.gather(x), layout.mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx, grad: DTensor):
        layout = ctx.layout
        if grad.placements[0].is_partial():
            return layout.sum(grad.to_local()), None
        return grad.redistribute(layout.mesh, [layout.placement]).to_local(), None


OUTPUTS: Mapping[str, int] = {"weight": 0, "bias": 0}  # dimensions of a linear map's parameters `[out, in]`, `[out]`


class Columnwise(ColwiseParallel):
    """`ColwiseParallel` whose input, laid out by `input_layout`, becomes whole by `ActivationLayout`. `peers`:
    what gathers activations, where kernels can do it."""

    def __init__(self, input_layout: Placement, peers: Collectives | None):
        super().__init__(input_layouts=input_layout)
        self.peers = peers

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        bind(module, into=ActivationLayout(device_mesh, *self.input_layouts, self.peers))
        return super()._apply(module, device_mesh)

    @staticmethod
    def _prepare_input_fn(given: Any, wanted: Any, module: Any, inputs: Any, mesh: DeviceMesh) -> Tensor:
        as_it_is = isinstance(inputs[0], DTensor) or exchanges(module.bound)
        return inputs[0] if as_it_is else whole_input(inputs[0], module.bound.into)

    @staticmethod
    def _prepare_output_fn(wanted: Any, use_local: bool, module: Any, made: Tensor, mesh: DeviceMesh) -> Tensor:
        return made.to_local() if isinstance(made, DTensor) else made


class DeferredBiasRowwise(RowwiseParallel):
    """`RowwiseParallel` for a `DeferredBiasLinear`: the bias, added after the sum over the ranks, stays a plain tensor
    on every rank. The sum is that of `ActivationLayout`; `peers`: what makes it, where kernels can do it."""

    def __init__(self, output_layout: Placement, peers: Collectives | None, input_layout: Placement | None = None):
        super().__init__(input_layouts=input_layout, output_layouts=output_layout)
        self.peers = peers

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        bias, module.bias = module.bias, None  # what is there becomes a DTensor
        bind(module, out=ActivationLayout(device_mesh, *self.output_layouts, self.peers))
        super()._apply(module, device_mesh)
        module.bias = bias
        return module

    @staticmethod
    def _prepare_output_fn(wanted: Any, use_local: bool, module: Any, made: Tensor, mesh: DeviceMesh) -> Tensor:
        return sum_parts(made.to_local(), module.bound.out) if isinstance(made, DTensor) else made


class SequencePart(ParallelStyle):
    """A style for a module that takes its part of the sequence, or of the heads, and has replicated parameters: the
    gradients of `names` are summed over the tp ranks."""

    def __init__(self, *names: str):
        super().__init__()
        self.sums_over_tp = names

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        bind(module, sums_over_tp=self.sums_over_tp)
        return module

    def __repr__(self) -> str:  # ranks compare their plans, and a run folder keeps its own, by this
        return f"{type(self).__name__}({', '.join(map(repr, self.sums_over_tp))})"


class SequencePositions(SequencePart):
    """A style for the position embedding under sequence parallelism: ids `[1, T]`, known to every rank, become its
    `[1, T / tp]`; the table stays whole."""

    def __init__(self) -> None:
        super().__init__("weight")

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        rank, ranks = device_mesh.get_local_rank(), device_mesh.size()
        module.register_forward_pre_hook(lambda module, inputs: (inputs[0].chunk(ranks, dim=1)[rank], *inputs[1:]))
        return super()._apply(module, device_mesh)


class SequenceRowwise(DeferredBiasRowwise):
    """`DeferredBiasRowwise` whose output is reduce-scattered over the sequence; each rank adds the bias to its part."""

    sums_over_tp = ("bias",)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        bind(module, sums_over_tp=self.sums_over_tp)
        return super()._apply(module, device_mesh)


class VocabularyRows(RowwiseParallel):
    """`RowwiseParallel` for the token table, whose sum is that of `ActivationLayout`."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: tuple[Placement], use_local_output: bool, mod: nn.Module, outputs: DTensor, mesh: DeviceMesh
    ) -> Tensor:
        return sum_rows(outputs, mesh, output_layouts[0])


class Partition(ParallelStyle):
    """A style that cuts the parameters of `dims`, by name along a dimension, and leaves the module's forward alone."""

    def __init__(self, **dims: int):
        super().__init__()
        self.dims = dims

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        for name, dim in self.dims.items():
            whole = getattr(module, name, None)
            if whole is not None:
                module.register_parameter(name, nn.Parameter(distribute_tensor(whole, device_mesh, [Shard(dim)])))
        return module


class VocabularyShard(Partition):
    """A style for the output layer: its table is cut over the vocabulary, its input gathered. It makes local
    logits, or a loss that is whole on every rank."""

    def __init__(self, input_layout: Placement, peers: Collectives | None = None):
        super().__init__(**OUTPUTS)
        self.input_layout, self.peers = input_layout, peers

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            x, *targets = inputs
            x = whole_input(x, ActivationLayout(mesh, self.input_layout, self.peers))
            if any(target is not None for target in targets):  # the loss works on local tensors: its gradients add up
                x = x.to_local(grad_placements=[Partial()])
            return (x, *targets)

        def local(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local() if isinstance(output, DTensor) else output

        return distribute_module(super()._apply(module, device_mesh), device_mesh, None, gather, local)


class DropoutShard(ParallelStyle):
    """A style for a dropout site whose input is cut evenly along dimension `dim` of the sample: it gets the global
    index of its first element. `sizes` is the whole shape of a sample's tensor."""

    def __init__(self, dim: int, sizes: tuple[int, ...]):
        super().__init__()
        self.dim, self.sizes = dim, sizes

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        first = self.sizes[self.dim] // device_mesh.size() * device_mesh.get_local_rank()
        bind(module, start=tuple(first if dim == self.dim else 0 for dim in range(len(self.sizes))))
        return module


Table = Mapping[str, ParallelStyle | None]


def default_table(
    config: ModelConfig, sequence_parallel: bool, seq_length: int, peers: Collectives | None
) -> dict[str, ParallelStyle]:
    """Return styles by module pattern. What is not in the table is replicated: every tp rank does the same.
    `seq_length`: of samples. `peers`: what gathers and sums activations, where kernels can do it."""
    length, heads = seq_length, config.num_heads
    # Between the matrices activations are whole on every rank, or each rank has its part of the sequence.
    between = Shard(1) if sequence_parallel else Replicate()
    row = SequenceRowwise if sequence_parallel else DeferredBiasRowwise
    styles: dict[Role, ParallelStyle] = {
        Role.VOCABULARY: VocabularyRows(input_layouts=Replicate(), output_layouts=between),
        Role.QKV: Columnwise(between, peers),
        Role.COLUMN: Columnwise(between, peers),
        Role.ROW: row(between, peers),
        Role.OUTPUT: VocabularyShard(between),
        Role.HEAD_DROPOUT: DropoutShard(0, (heads, length, length)),
        Role.HEAD_NORM: SequencePart("weight"),  # each rank has the gradient of its own heads
    }
    if sequence_parallel:
        styles |= {
            Role.POSITIONS: SequencePositions(),
            Role.NORM: SequencePart("weight", "bias"),
            Role.STREAM_DROPOUT: DropoutShard(0, (length, config.hidden_size)),
        }
    own = seams.added("role_styles")
    styles |= {role: seams.load(own[role.name])(between, peers) for role in config.roles.values() if role.name in own}
    return {pattern: styles[role] for pattern, role in config.roles.items() if role in styles}


def make_table(
    config: ModelConfig, plan: Plan, seq_length: int | None = None, peers: Collectives | None = None
) -> Table:
    """Return styles by module pattern: the first that matches a module counts. Those of a plan's own table come from a
    capability, before the default ones. `seq_length`: of samples; None: all positions. `peers`: what gathers and sums
    activations, where kernels can do it. Raises UserError for an own style that no model can have."""
    default = default_table(config, plan.sequence_parallel, seq_length or config.seq_length, peers)
    if not plan.table:
        return default
    (with_own_styles,) = seams.listed("own_styles")
    return with_own_styles(config, plan, default, peers)


def style_of(module: str, table: Table) -> ParallelStyle | None:
    """Return the style that the table gives the module of this name; None: replicated."""
    return next((style for pattern, style in table.items() if matches(module, pattern)), None)


def apply_table(part: Decoder, mesh: DeviceMesh, table: Table) -> None:
    """Cut the parameters of `part` (on the meta device) over the tp `mesh`, and tie the weights again, which
    `parallelize_module` unties."""
    styles = {name: style_of(name, table) for name, _ in part.named_modules()}
    parallelize_module(part, mesh, {name: style for name, style in styles.items() if style is not None})
    part.tie_weights()

"""Low-rank adapters (LoRA; Hu et al. 2021) on the matrices of a model whose own weights stay frozen.

A matrix W `[out, in]` computes y = x W^T + (alpha / rank) (x A^T) B^T. A weight that packs several matrices (queries,
keys and values; gate and up) has an A `[rank, in]` for each, one below the other, and one B `[out, rank]`: each row
of B belongs to the matrix of the same row of W. Results are those of separate adapters, as Hugging Face's peft has
them. In a stack of matrices `[E, out, in]` each has an A and a B of its own, `[E, rank, in]` and `[E, out, rank]`,
whose products are grouped as those of the stack are.

Tensor parallelism cuts one of the two as it cuts W: B by its rows, or A by its columns. The other is whole on every
rank, and its gradients are addends.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtgpt.config.execution import Settings
from dtgpt.models.binding import bind
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.inventory import Parameter, Shape, inventory
from dtgpt.models.shared.packed import pieces
from dtgpt.ops.local_tensors import Function, on_local_tensors
from dtgpt.ops.random.philox import fold, normal, row_chunks
from dtgpt.parallel.layout import INPUTS, OUTPUTS, ZERO, ParameterLayout
from dtgpt.parallel.mesh import RankCoordinates
from dtgpt.parallel.shards import Shards, layout_of
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.posttrain.lora.four_bits import Drawn, InFourBits, hold
from dtgpt.util.torch_private import is_dtensor

if TYPE_CHECKING:  # a plan without tensor parallelism has none, and importing it takes half a second
    from torch.distributed.tensor import DTensor

NAME = "lora"  # of the module below that of the matrix
A, B = f".{NAME}.a", f".{NAME}.b"  # in place of ".weight"


def adapted(config: ModelConfig, lora: LoraConfig) -> Iterator[Parameter]:
    """Yield the weights that have an adapter, in the order of the modules."""
    return (parameter for parameter in inventory(config).parameters() if lora.adapts(parameter))


def names_of(weight: str) -> tuple[str, str]:
    """Return the names of A and B of the adapter of a weight."""
    module = weight.removesuffix(".weight")
    return module + A, module + B


def shapes_of(parameter: Parameter, config: ModelConfig, rank: int) -> tuple[Shape, Shape]:
    """Return the shapes of A and B of the adapter of a weight; of a stack, those of each matrix are stacked."""
    return _shapes(parameter.shape, count_packed(parameter, config), rank)


def _shapes(shape: Shape, count: int, rank: int) -> tuple[Shape, Shape]:
    *stack, rows, columns = shape
    return (*stack, count * rank, columns), (*stack, rows, rank)


def count_packed(parameter: Parameter, config: ModelConfig) -> int:
    """Return the number of matrices that a weight packs; 1 for a stack, where an adapter is a stack, too."""
    return 1 if len(parameter.shape) > 2 else len(pieces(config, parameter))


def cut_from_the_end(layout: ParameterLayout, axis: str) -> int | None:
    """Return the dimension of a matrix, or a stack of matrices, that an axis cuts, OUTPUTS or INPUTS; None for a
    vector, or where it cuts none."""
    return layout.cuts[axis] - len(layout.shape) if axis in layout.cuts and len(layout.shape) > 1 else None


def layouts_of(
    weight: ParameterLayout, parameter: Parameter, config: ModelConfig, rank: int
) -> tuple[ParameterLayout, ParameterLayout]:
    """Return the layouts of A and B of the adapter of a weight: A has no rows of it that could be cut, and B no
    columns."""
    shapes = shapes_of(parameter, config, rank)
    whole = [axis for axis in weight.cuts if axis not in ZERO]
    rows, columns = ([axis for axis in whole if cut_from_the_end(weight, axis) == dim] for dim in (OUTPUTS, INPUTS))
    a, b = (
        replace(
            weight,
            shape=shape,
            cuts={axis: dim for axis, dim in weight.cuts.items() if axis not in lacks},
            sums_over=tuple(lacks),
        )
        for shape, lacks in zip(shapes, (rows, columns), strict=True)
    )
    return a, b


def matrix_of_rows(parameter: Parameter, config: ModelConfig) -> Tensor:
    """Return the index, among the matrices that a weight packs, of the one of each row: int64 `[out]`."""
    found = torch.zeros(parameter.shape[-2], dtype=torch.int64)
    for index, rows in enumerate(pieces(config, parameter)[: count_packed(parameter, config)]):
        for part in rows:
            found[part.start : part.stop : part.step] = index
    return found


def spread(b: Tensor, matrices: Tensor, count: int) -> Tensor:
    """Return B `[out, rank]` as a factor of all of A, `[out, count rank]`, which is zero outside of the rank columns of
    the matrix `matrices[row]`."""
    if count == 1:
        return b
    own = (matrices[:, None] == torch.arange(count, device=b.device)).to(b.dtype)
    return (own[:, :, None] * b[:, None, :]).flatten(1)


class Adapter(nn.Module):
    """A and B of one weight, and the product with both."""

    def __init__(self, a: Tensor, b: Tensor, matrices: Tensor, count: int, scale: float, frozen: Function = F.linear):
        """matrices: as of `spread`, of the rows that this rank has of B. frozen: makes x W^T + bias of x, what holds W,
        and the bias, but for a stack."""
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)
        self.matrices, self.count, self.scale, self.frozen = matrices, count, scale, frozen

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, multiply: Function | None = None) -> Tensor:
        """Return x W^T + bias with the adapter's addend, of the local tensors of a linear map; for a stack of maps
        `[E, out, in]` with the inputs `[E, .., in]`, `[E, .., out]`. multiply: x, weights, bias -> rows, of a stack
        that says itself which rows meet which of its maps."""
        a, b = (_local(parameter).to(x.dtype) for parameter in (self.a, self.b))
        if multiply is not None:
            return multiply(x, weight, bias) + multiply(multiply(x, a, None) * self.scale, b, None)
        if weight.dim() == 3:
            return torch.baddbmm(torch.bmm(x, weight.mT), torch.bmm(x, a.mT) * self.scale, b.mT)
        if self.matrices.device != b.device:
            self.matrices = self.matrices.to(b.device)
        y = self.frozen(x, weight, bias)
        low = F.linear(x, a) * self.scale
        return torch.addmm(y.flatten(0, -2), low.flatten(0, -2), spread(b, self.matrices, self.count).t()).view(y.shape)


def add_local(module: nn.Module, parameter: Parameter, config: ModelConfig, lora: LoraConfig) -> None:
    """Let this rank's part of a matrix compute as in a run, by which planning measures what a block keeps."""
    count, weight = count_packed(parameter, config), module.get_parameter("weight")
    frozen: Function = F.linear
    a, b = (weight.new_empty(each) for each in _shapes(tuple(weight.shape), count, lora.rank))
    if lora.quantises(parameter):
        frozen = hold(module, tuple(map(range, weight.shape)), tuple(weight.shape))
    if lora.adapts(parameter):
        matrices = torch.zeros(b.shape[-2], dtype=torch.int64, device=a.device)
        attach(module, Adapter(a, b, matrices, count, lora.scale, frozen))


def attach(module: nn.Module, adapter: Adapter) -> None:
    """Let a linear map, or a stack of them, compute with its adapter. A stack gives its local weight."""
    module.add_module(NAME, adapter)
    is_stack = adapter.a.dim() > 2
    bind(module, product=adapter.product if is_stack else partial(on_local_tensors, adapter.product))


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if is_dtensor(parameter) else parameter


def add_adapters(part: Decoder, settings: Settings, place: RankCoordinates, device: torch.device) -> None:
    """Add the adapters of a stage on the meta device, cut by tensor parallelism, to it. device: of the run."""
    config, lora = part.config, settings.section(LoraConfig)
    dtype = settings.dtype if settings.plan.narrows_weights else torch.float32
    for parameter in inventory(config).parameters():
        changed = lora.adapts(parameter) or lora.quantises(parameter)
        if str(parameter.block) not in part.blocks or not changed:
            continue
        module = part.get_submodule(parameter.name.removesuffix(".weight"))
        weight = module.get_parameter("weight")
        frozen: Function = F.linear
        layout_of_weight = layout_of(weight, settings.plan)
        if lora.quantises(parameter):
            frozen = hold(module, layout_of_weight.region(place.rank, without="shard"), parameter.shape)
        if not lora.adapts(parameter):
            continue
        layouts = layouts_of(layout_of_weight, parameter, config, lora.rank)
        factors = []
        for layout in layouts:
            with torch.device("meta"):
                factors.append(torch.empty(layout.shape, dtype=dtype))
            if any(axis in layout.cuts for axis in layout.axes if axis not in ZERO):
                from torch.distributed.tensor import Replicate, distribute_tensor
                from torch.distributed.tensor import Shard as Sharded

                mesh = cast("DTensor", weight).device_mesh
                cuts = [layout.cuts.get(axis) for axis in mesh.mesh_dim_names or ()]
                placements = [Replicate() if dim is None else Sharded(dim) for dim in cuts]
                factors[-1] = distribute_tensor(factors[-1], mesh, placements)
        a, b = factors
        rows = layouts[1].region(place.rank, without="shard")[-2]
        matrices = matrix_of_rows(parameter, config)[rows.start : rows.stop].to(device)
        adapter = Adapter(a, b, matrices, count_packed(parameter, config), lora.scale, frozen)
        attach(module, adapter)
        bind(adapter, sums_over_tp=tuple(n for n, own in zip("ab", layouts, strict=True) if "tp" in own.sums_over))


@torch.no_grad()
def initialize_adapters(shards: Shards, settings: Settings, key: Tensor, draws_weights: bool) -> None:
    """Fill A with values of the variance of peft's, 1 / (3 in), as a function of (key, name, global index), and B with
    zeros, so that a run begins with the function of the frozen weights. draws_weights: whether these are random; those
    in 4 bits are then drawn here."""
    lora = settings.section(LoraConfig)
    if draws_weights and lora.bits and shards.frozen:
        device = shards.mesh.device
        drawn = InFourBits(Drawn(settings.model, key, device), lora, device)
        for shard in shards.frozen:
            if not shard.local.is_floating_point():
                shard.local.copy_(drawn.read(shard.name, shard.region))
    for shard in shards:
        if shard.name.endswith(B):
            shard.local.zero_()
        if not shard.name.endswith(A):
            continue
        own, std = fold(key, shard.name).to(shard.local.device), (3 * shard.parameter.shape[-1]) ** -0.5
        for rows, piece in row_chunks(shard.region):
            shard.local[rows] = std * normal(own, piece)
    shards.publish()

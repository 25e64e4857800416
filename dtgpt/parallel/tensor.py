"""Tensor and sequence parallelism: a table {module pattern: style} for `parallelize_module`.

The cut is Megatron-LM's (Shoeybi et al. 2019; sequence parallelism: Korthikanti et al. 2022): the first matrix of a
pair by columns, the second by rows, the token table and the logits over the vocabulary. Between modules there are
local tensors; inside a module of the table, weights and activations are DTensors.
"""

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from dtgpt.errors import UserError
from dtgpt.model import GPT, GPTConfig, Product
from dtgpt.parallel.plan import Plan


class _SumInPlace(torch.autograd.Function):
    """The sum over ranks that then all hold it; of its gradient each rank holds the whole."""

    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(part, group=group)
        return part.view_as(part)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class RowwiseProduct(RowwiseParallel):
    """`RowwiseParallel` for a product whose bias is added behind the sum over the ranks: the bias stays a plain
    tensor on every rank. A sum that all are to hold is made in place, where DTensor would copy its addend first."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        bias, module.bias = module.bias, None  # what is there becomes a DTensor
        wanted, whole = self.output_layouts, (Replicate(),)
        if wanted == whole and self.use_local_output:
            self.output_layouts = (Partial(),)
            super()._apply(module, device_mesh)
            self.output_layouts = wanted
            module.register_forward_hook(lambda module, inputs, part: _sum(part, device_mesh))
        else:
            super()._apply(module, device_mesh)
        module.bias = bias
        return module

    @classmethod
    def like(cls, style: RowwiseParallel) -> "RowwiseProduct":
        layouts = {"input_layouts": style.input_layouts[0], "output_layouts": style.output_layouts[0]}
        return cls(**layouts, use_local_output=style.use_local_output)


def _sum(part: Tensor, mesh: DeviceMesh) -> Tensor:
    if torch.compiler.is_compiling():  # the compiler removes the copy by itself
        return DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(mesh, [Replicate()]).to_local()
    return _SumInPlace.apply(part, mesh.get_group())


class SequencePart(ParallelStyle):
    """For a module that sees its part of the sequence with parameters that every rank holds: the gradients of these
    `names` add up over the ranks."""

    def __init__(self, *names: str):
        super().__init__()
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.sums_over_tp = self.names
        return module

    def __repr__(self) -> str:  # ranks compare their plans, and a run folder keeps its own, by this
        return f"{type(self).__name__}({', '.join(map(repr, self.names))})"


class SequencePositions(SequencePart):
    """For the position embedding under sequence parallelism: ids `[1, T]`, known to every rank, become its
    `[1, T / tp]`; the table stays whole."""

    def __init__(self) -> None:
        super().__init__("weight")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank, ranks = device_mesh.get_local_rank(), device_mesh.size()
        module.register_forward_pre_hook(lambda module, inputs: (inputs[0].chunk(ranks, dim=1)[rank], *inputs[1:]))
        return super()._apply(module, device_mesh)

    def __repr__(self) -> str:
        return "SequencePositions()"


class SequenceProduct(RowwiseProduct):
    """`RowwiseProduct` that leaves each rank its part of the sequence, to which it then adds the bias."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.sums_over_tp = ("bias",)
        return super()._apply(module, device_mesh)


class VocabularyShard(ParallelStyle):
    """For the output layer: its table is cut over the vocabulary, its input gathered. It makes local logits, or a loss
    that is whole on every rank."""

    def __init__(self, input_layout: Placement):
        super().__init__()
        self.input_layout = input_layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            module.register_parameter("weight", nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)])))

        def gather(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            x, *targets = inputs
            x = DTensor.from_local(x, mesh, [self.input_layout], run_check=False).redistribute(mesh, [Replicate()])
            if any(target is not None for target in targets):  # the loss works on local tensors: its gradients add up
                x = x.to_local(grad_placements=[Partial()])
            return (x, *targets)

        def local(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local() if isinstance(output, DTensor) else output

        return distribute_module(module, device_mesh, cut, gather, local)

    def __repr__(self) -> str:
        return f"VocabularyShard({self.input_layout})"


class DropoutShard(ParallelStyle):
    """For a dropout site whose input is cut evenly along dimension `dim` of the sample: tells it the global index of
    its first element. `sizes` is the whole shape of a sample's tensor."""

    def __init__(self, dim: int, sizes: tuple[int, ...]):
        super().__init__()
        self.dim, self.sizes = dim, sizes

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        first = self.sizes[self.dim] // device_mesh.size() * device_mesh.get_local_rank()
        module.start = tuple(first if dim == self.dim else 0 for dim in range(len(self.sizes)))
        return module

    def __repr__(self) -> str:
        return f"DropoutShard(dim={self.dim}, sizes={self.sizes})"


def default_table(config: GPTConfig, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Styles by module pattern. What is not in the table is replicated: every tp rank does the same."""
    length, heads = config.seq_length, config.num_heads
    # What lies between the matrices: whole on every rank, or its part of the sequence.
    between = Shard(1) if sequence_parallel else Replicate()
    product = SequenceProduct if sequence_parallel else RowwiseProduct
    table: dict[str, ParallelStyle] = {
        "embedding.wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "blocks.*.attn.qkv": ColwiseParallel(input_layouts=between),
        "blocks.*.attn.dropout": DropoutShard(0, (heads, length, length)),
        "blocks.*.attn.proj": product(output_layouts=between),
        "blocks.*.mlp.fc": ColwiseParallel(input_layouts=between),
        "blocks.*.mlp.proj": product(output_layouts=between),
        "head.lm_head": VocabularyShard(between),
    }
    if sequence_parallel:
        site = DropoutShard(0, (length, config.hidden_size))
        norm = SequencePart("weight", "bias")
        table |= {
            "embedding.wpe": SequencePositions(),
            "embedding.drop": site,
            "blocks.*.ln_1": norm,
            "blocks.*.drop_1": site,
            "blocks.*.ln_2": norm,
            "blocks.*.drop_2": site,
            "head.ln_f": norm,
        }
    return table


Table = Mapping[str, ParallelStyle | None]


def make_table(config: GPTConfig, plan: Plan) -> Table:
    """The plan's own entries, then the default ones: the first that matches a module counts. Raises UserError for a
    pattern that names no module, or one whose style follows from others."""
    default = default_table(config, plan.sequence_parallel)
    if plan.table:
        with torch.device("meta"):
            model = GPT(config)
        _check_own(plan.table, [name for name, _ in model.named_modules()])
    product = SequenceProduct if plan.sequence_parallel else RowwiseProduct
    own = {
        pattern: product.like(style) if type(style) is RowwiseParallel and _are_products(model, pattern) else style
        for pattern, style in plan.table.items()
    }
    table = own | {pattern: style for pattern, style in default.items() if pattern not in own}
    if plan.table and plan.sequence_parallel:
        _check_covers(table, model)
    return table


def _are_products(model: GPT, pattern: str) -> bool:
    """Whether the modules of this pattern leave their bias to what comes behind them."""
    return any(isinstance(module, Product) for name, module in model.named_modules() if _matches(name, pattern))


def _check_covers(table: Table, model: GPT) -> None:
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)) and style_of(name, table) is None:
            raise UserError(
                f"under sequence parallelism {name!r} would see its part of the sequence alone and its gradient would "
                "be wrong; leave its entry out of the plan's table"
            )


def _check_own(table: Table, names: list[str]) -> None:
    fixed = {name: reason for name in names if (reason := _why_fixed(name))}
    for pattern, style in table.items():
        if style is not None and not isinstance(style, ParallelStyle):
            raise UserError(
                f"the plan's table gives {pattern!r} {style!r}, which is no style; give one such as ColwiseParallel(), "
                "or None"
            )
        matched = [name for name in names if _matches(name, pattern)]
        if not matched:
            free = (name.split(".") for name in names if name and name not in fixed)
            known = sorted({".".join("*" if part.isdigit() else part for part in parts) for parts in free})
            raise UserError(f"the plan's table names {pattern!r}, but no module; use one of {', '.join(known)}")
        for name in matched:
            if name in fixed:
                raise UserError(f"the plan's table replaces {name!r}, but {fixed[name]}; leave this entry out")


def _why_fixed(name: str) -> str | None:
    if name in ("embedding.wte", "head.lm_head"):
        return "the loss and the tied table are cut over the vocabulary"
    if ".drop" in f".{name}":
        return "the masks of a dropout site follow from the modules around it"
    if ".ln_" in f".{name}" or name == "embedding.wpe":
        return "what lies between the matrices follows from sequence parallelism"
    return None


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatch(p, w) for p, w in zip(parts, wanted, strict=True))


def style_of(module: str, table: Table) -> ParallelStyle | None:
    """The style that the table gives the module of this name; None: replicated."""
    if module.endswith("attn.dropout"):  # sees the heads that qkv gives it
        qkv = style_of(module.removesuffix("dropout") + "qkv", table)
        if not isinstance(qkv, ColwiseParallel):
            return None
    return next((style for pattern, style in table.items() if _matches(module, pattern)), None)


def apply_table(part: GPT, mesh: DeviceMesh, table: Table) -> None:
    """Cut the parameters of `part` (on the meta device) over the tp `mesh`, and tie the weights again, which
    `parallelize_module` unties."""
    styles = {name: style_of(name, table) for name, _ in part.named_modules()}
    parallelize_module(part, mesh, {name: style for name, style in styles.items() if style is not None})
    part.tie_weights()

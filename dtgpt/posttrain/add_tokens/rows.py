"""Rows of new tokens that are trained beside adapters, while the other rows of the table stay as they are.

The rows are a parameter of their own, `[count, H]`, whole on every rank of tensor parallelism. Before a pass reads the
table they are written into it, in place, and the gradient of the table gives theirs: so whatever a plan does with a
table that is trained it does here, and no second table is kept. The gradient of the whole table is made on the way."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dtgpt.config.execution import Settings
from dtgpt.models.binding import bind
from dtgpt.models.decoder import Decoder
from dtgpt.models.inventory import Parameter
from dtgpt.models.roles import Role
from dtgpt.models.source import Source
from dtgpt.parallel.layout import ZERO, ParameterLayout
from dtgpt.parallel.mesh import RankCoordinates
from dtgpt.parallel.shards import Shards, layout_of
from dtgpt.posttrain.add_tokens.config import AddTokensConfig
from dtgpt.util.errors import UserError
from dtgpt.util.torch_private import is_dtensor

ENTRY = "added_tokens"  # of `state.json`
NAME = "new_rows"  # of the module below that of the table


def name_of(table: str) -> str:
    """Return the name of the new rows of a table."""
    return f"{table.removesuffix('.weight')}.{NAME}.weight"


def rows_of(table: Parameter, layout: ParameterLayout, settings: Settings) -> tuple[Parameter, ParameterLayout] | None:
    """Return the new rows that are trained of a parameter, and their layout; None where there are none."""
    count, roles = settings.section(AddTokensConfig).count, (Role.OUTPUT, Role.VOCABULARY)
    if not count or table.role not in roles or len(table.shape) < 2:
        return None
    shape = (count, table.shape[1])
    return table._replace(name=name_of(table.name), shape=shape), replace(layout, shape=shape, cuts=dict(ZERO))


class NewRows(nn.Module):
    """Rows of new tokens. first: of this rank's part of the table, the row of the first of them; may be negative."""

    def __init__(self, weight: Tensor, first: int):
        super().__init__()
        self.weight, self.first = nn.Parameter(weight), first

    def insert(self, table: Tensor) -> Tensor:
        """Return a table, or this rank's part of it, with these rows."""
        if not is_dtensor(table):
            return Inserted.apply(self.weight, table, self.first)
        local: Any = table
        made = Inserted.apply(self.weight, local.to_local(), self.first)
        return type(local).from_local(made, local.device_mesh, local.placements, run_check=False)


class Inserted(torch.autograd.Function):
    """Write `rows` into a table that is not trained, from its row `first` on, and return it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, table: Tensor, first: int) -> Tensor:
        begin, end = max(0, -first), max(0, min(len(rows), len(table) - first))
        ctx.own, ctx.there, ctx.shape = (begin, end), slice(first + begin, first + end), rows.shape
        if begin < end:
            # By `data`: passes that have read the same values before are not disturbed.
            table.data[ctx.there].copy_(rows[begin:end])
        return table.view_as(table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        begin, end = ctx.own
        found = gradient.new_zeros(ctx.shape)
        if begin < end:
            found[begin:end] = gradient[ctx.there]
        return found, None, None


def add_rows(part: Decoder, settings: Settings, place: RankCoordinates, device: torch.device) -> None:
    """Add the rows of new tokens to the tables of a stage on the meta device, cut by tensor parallelism."""
    new, config = settings.section(AddTokensConfig), part.config
    if not new.count:
        return
    dtype = settings.dtype if settings.plan.narrows_weights else torch.float32
    tables = [name for name, end in ((config.table_name, part.embedding), (config.output_name, part.head)) if end]
    rows: NewRows | None = None
    for name in tables:
        module = part.get_submodule(name.removesuffix(".weight"))
        weight = module.get_parameter("weight")
        layout = layout_of(weight, settings.plan)
        cut, first = layout.cuts.get("tp"), layout.region(place.rank, without="shard")[0].start
        if settings.plan.tp > 1 and cut != 0:
            raise UserError(
                f"add_tokens.file={new.file} trains rows of {name}, which the plan {settings.plan.name} does not cut "
                "over the vocabulary; use a plan without a table of its own, or --lora.rank 0"
            )
        if rows is None or not config.tied:
            with torch.device("meta"):
                rows = NewRows(torch.empty(new.count, weight.shape[1], dtype=dtype), new.first - first)
            module.add_module(NAME, rows)
            bind(rows, sums_over_tp=("weight",) if settings.plan.tp > 1 else ())
        read_with(module, rows)


def read_with(module: nn.Module, rows: NewRows) -> None:
    """Let a module read its table with the rows, in each forward pass."""

    def shadow(module: nn.Module, given: Any) -> None:
        # What an instance has stands before its parameters.
        vars(module)["weight"] = rows.insert(module.get_parameter("weight"))

    def unveil(module: nn.Module, given: Any, made: Any) -> None:
        vars(module).pop("weight", None)

    module.register_forward_pre_hook(shadow)
    module.register_forward_hook(unveil, always_call=True)


@torch.no_grad()
def fill_rows(shards: Shards, source: Source, first: int) -> None:
    """Give the rows that are trained the values that a model has from row `first` on."""
    end = f".{NAME}.weight"
    for shard in shards:
        if shard.name.endswith(end):
            rows, *columns = shard.region
            place = range(rows.start + first, rows.stop + first)
            shard.local.copy_(source.read(f"{shard.name.removesuffix(end)}.weight", (place, *columns)))
    shards.publish()

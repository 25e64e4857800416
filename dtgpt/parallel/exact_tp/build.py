"""What a stage is given to compute in pieces."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dtgpt.models.binding import BoundModule, bind, bound_of
from dtgpt.models.decoder import Decoder
from dtgpt.models.layers import AttentionCore, Table
from dtgpt.models.roles import Role, role_of
from dtgpt.ops.local_tensors import on_local_tensors
from dtgpt.ops.norms import rows_summed_by
from dtgpt.parallel.build import Building, Entry
from dtgpt.parallel.collectives import Collectives
from dtgpt.parallel.exact_tp import NAME
from dtgpt.parallel.exact_tp.config import FAST, WHOLE, pieces_of_size, values_of
from dtgpt.parallel.exact_tp.heads import attend_by_heads
from dtgpt.parallel.exact_tp.loss import PiecewiseLoss
from dtgpt.parallel.exact_tp.products import column_product, row_product
from dtgpt.parallel.exact_tp.rows import PiecewiseRows
from dtgpt.parallel.exact_tp.table import look_up
from dtgpt.parallel.exact_tp.tree import Share, TreeCollectives, sum_over_ranks
from dtgpt.util.errors import UserError

Sum = Callable[[Tensor], Tensor]  # over the ranks, of what is whole on each afterwards
if TYPE_CHECKING:
    from dtgpt.parallel import tensor


def add_in_trees(table: "tensor.Table", building: Building) -> "tensor.Table":
    """Return a table whose styles add up activations in a tree over the ranks, where there are more than two."""
    from dtgpt.parallel.tensor import VocabularyShard, default_table

    settings, plan = building.settings, building.settings.plan
    if plan.tp <= 2:  # a sum of two has no order
        return table
    sums = collectives_of(building)
    styles = default_table(settings.model, plan.sequence_parallel, settings.local_length, sums)
    heads = {name: style for name, style in styles.items() if isinstance(style, VocabularyShard)}
    return {**styles, **{name: VocabularyShard(style.input_layout, sums) for name, style in heads.items()}}


def collectives_of(building: Building) -> Collectives | None:
    """Return what sums over the tensor-parallel ranks in place of torch.distributed, where the order counts."""
    if building.settings.plan.tp <= 2:
        return building.peers
    return TreeCollectives(building.mesh.devices.get_group("tp"), building.peers)


def sum_of_ranks(building: Building) -> Sum | None:
    """Return what adds up tensors that are whole on each tensor-parallel rank; None where there is one."""
    if building.settings.plan.tp == 1:
        return None
    from torch.distributed.tensor import Replicate

    from dtgpt.parallel.tensor import ActivationLayout

    return ActivationLayout(building.mesh.devices["tp"], Replicate(), collectives_of(building)).sum


def share_of(building: Building) -> Callable[[int], Share]:
    """Return what says which pieces this rank has of a dimension that tensor parallelism cuts, by its size."""
    group = building.mesh.devices.get_group("tp") if building.settings.plan.tp > 1 else None
    most = values_of(building.settings).pieces
    return lambda size: Share.of(pieces_of_size(size, most), group)


def cut_into_pieces(part: Decoder, building: Building) -> None:
    """Bind the products of a stage, what sums its gradients over rows, and its loss. Raises UserError for a token table
    of another class, whose gradient may depend on the plan."""
    settings, plan, share = building.settings, building.settings.plan, share_of(building)
    for name, module in part.named_modules():
        role = role_of(name, settings.model.roles)
        _bind_sums(role, module, share)
        if role in (Role.QKV, Role.COLUMN):
            bind(module, product=local_product(partial(column_product, share(module.weight.shape[0]).number)))
        elif role is Role.VOCABULARY and plan.tp > 1:
            bind(_checked(module), product=look_up)
        if role in WHOLE and bound_of(module).sums_over_tp:
            bind(module, sums_over_tp=())  # which are whole on each rank
        if isinstance(module, AttentionCore):
            bind(module, run=partial(attend_by_heads, module))
    positions = share(settings.local_length)
    if not plan.sequence_parallel:
        positions = Share(pieces_of_size(settings.local_length, values_of(settings).pieces))
    rows = PiecewiseRows(positions, share, plan.tp)
    for end in (part.embedding, *part.blocks.values(), part.head):
        if isinstance(end, BoundModule):
            bind(end, run=partial(_within, rows, end.runner))


def add_in_pieces(part: Decoder, building: Building) -> None:
    """Bind to a stage for inference what has the bits of a stage in training: the sums that a plan may cut, and the
    terms of the loss. All other results have them anyway."""
    settings, share, most = building.settings, share_of(building), values_of(building.settings).pieces
    if most % settings.plan.tp:
        raise UserError(
            f"the run has {NAME}.pieces={most}, which tp={settings.plan.tp} does not divide; use a tp that does, or "
            "leave exact out"
        )
    for name, module in part.named_modules():
        role = role_of(name, settings.model.roles)
        _bind_sums(role, module, share)
        if role is Role.ROW and settings.plan.tp > 2:
            bind(module, over_ranks=partial(sum_over_ranks, group=building.mesh.devices.get_group("tp")))


def _bind_sums(role: Role | None, module: Any, share: Callable[[int], Share]) -> None:
    """Bind what sums in forward over what tensor parallelism may cut."""
    if role is Role.ROW:
        own = share(module.weight.shape[1]).number
        bind(module, product=local_product(partial(row_product, own)), pieces=own)
    elif role is Role.OUTPUT:
        bind(module, loss=PiecewiseLoss(share(module.weight.shape[0])))


def _checked(table: Any) -> Table:
    if not isinstance(table, Table):
        raise UserError(
            f"reduce={NAME}, but the token embedding is a {type(table).__name__}; make it a dtgpt.models.layers.Table, "
            f"or use {FAST}"
        )
    return table


def local_product(product: Callable[..., Any]) -> Callable[..., Any]:
    """Return a product of what this rank has of its operands."""
    return partial(on_local_tensors, product)


def _within(rows: PiecewiseRows, run: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    with rows_summed_by(rows):
        return run(*inputs, **named)


PIECES = Entry("pieces", when=lambda made: made.masters, deed=cut_into_pieces, after="tensor parallelism")
SERVED = Entry("pieces", when=lambda made: not made.masters, deed=add_in_pieces, after="tensor parallelism")

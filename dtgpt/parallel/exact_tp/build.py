"""What a stage is given to compute in pieces."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

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
from dtgpt.parallel.exact_tp.joint import joint_norm
from dtgpt.parallel.exact_tp.loss import PiecewiseLoss
from dtgpt.parallel.exact_tp.products import column_product, row_product
from dtgpt.parallel.exact_tp.rows import PiecewiseRows
from dtgpt.parallel.exact_tp.stacks import Sum, column_stack, inner_column, inner_row, row_stack
from dtgpt.parallel.exact_tp.table import look_up
from dtgpt.parallel.exact_tp.tree import Share, TreeCollectives, sum_over_ranks
from dtgpt.util.errors import UserError

if TYPE_CHECKING:
    from dtgpt.parallel import tensor
    from dtgpt.parallel.exact_tp.owners import Owners


def add_in_trees(table: "tensor.Table", building: Building) -> "tensor.Table":
    """Return a table whose styles add up activations in a tree over the ranks, where there are more than two, and leave
    what is between the ends of a branch whole."""
    from torch.distributed.tensor import Replicate, Shard

    from dtgpt.parallel.exact_tp.branches import WholeBranchEnd
    from dtgpt.parallel.tensor import VocabularyShard, default_table

    settings, plan = building.settings, building.settings.plan
    sums = _collectives(building)
    if plan.tp > 2:  # a sum of two has no order
        styles = default_table(settings.model, plan.sequence_parallel, settings.local_length, sums)
        heads = {name: style for name, style in styles.items() if isinstance(style, VocabularyShard)}
        table = {**styles, **{name: VocabularyShard(style.input_layout, sums) for name, style in heads.items()}}
    between = Shard(1) if plan.sequence_parallel else Replicate()
    ends = {name: role is Role.ENTRY for name, role in settings.model.roles.items() if role in (Role.ENTRY, Role.EXIT)}
    return {**table, **{name: WholeBranchEnd(between, sums, begins) for name, begins in ends.items()}}


def _collectives(building: Building) -> Collectives | None:
    """Return what sums over the tensor-parallel ranks in place of torch.distributed, where the order counts."""
    if building.settings.plan.tp <= 2:
        return building.peers
    return TreeCollectives(building.mesh.devices.get_group("tp"), building.peers)


def _sum_of_ranks(building: Building) -> Sum | None:
    """Return what adds up tensors that are whole on each tensor-parallel rank; None where there is one."""
    if building.settings.plan.tp == 1:
        return None
    from torch.distributed.tensor import Replicate

    from dtgpt.parallel.tensor import ActivationLayout

    return ActivationLayout(building.mesh.devices["tp"], Replicate(), _collectives(building)).sum


def _owners(part: Decoder, building: Building) -> "Owners | None":
    """Return which rank goes on with which tokens, where the rows of experts are added up for it alone: not where all
    ranks add biases to rows, or expert parallelism has other tokens' rows."""
    plan, roles = building.settings.plan, building.settings.model.roles
    stacks = [module for name, module in part.named_modules() if role_of(name, roles) is Role.ROW_STACK]
    if not plan.sequence_parallel or plan.ep > 1 or not stacks or any(each.bias is not None for each in stacks):
        return None
    from torch.distributed.tensor import Shard

    from dtgpt.parallel.exact_tp.owners import Owners
    from dtgpt.parallel.tensor import ActivationLayout

    peers, mesh = _collectives(building), building.mesh.devices["tp"]
    return Owners(building.settings.local_length, *(ActivationLayout(mesh, Shard(dim), peers) for dim in (0, 1)))


def cut_into_pieces(part: Decoder, building: Building) -> None:
    """Bind the products of a stage, what sums its gradients over rows, and its loss. Raises UserError for a token table
    of another class, whose gradient may depend on the plan."""
    settings, plan = building.settings, building.settings.plan
    group = building.mesh.devices.get_group("tp") if plan.tp > 1 else None
    most, sums = values_of(settings).pieces, _sum_of_ranks(building)
    owners = _owners(part, building)

    def share(size: int) -> Share:
        return Share.of(pieces_of_size(size, most), group)

    for name, module in part.named_modules():
        role = role_of(name, settings.model.roles)
        if own := _sums_of_forward(role, module, share, None if owners and role is Role.ROW_STACK else sums):
            bind(module, **own)
        if owners and role is Role.ROW_STACK:
            from dtgpt.parallel.exact_tp.owners import sums_of_owners

            experts: Any = part.get_submodule(name.rpartition(".")[0])
            bind(experts, run=partial(sums_of_owners, experts, owners))
        if role in (Role.QKV, Role.COLUMN):
            bind(module, product=_local(partial(column_product, share(module.weight.shape[0]).number)))
        elif role is Role.INNER_COLUMN:
            bind(module, product=_local(partial(inner_column, share(module.weight.shape[0]).number, sums)))
        elif role is Role.COLUMN_STACK:
            bind(module, product=partial(column_stack, share(module.weight.shape[1]).number, None if owners else sums))
        elif role is Role.VOCABULARY and group is not None:
            bind(_checked(module), product=look_up)
        if role in WHOLE and bound_of(module).sums_over_tp:
            bind(module, sums_over_tp=())  # which are whole on each rank
        if isinstance(module, AttentionCore):
            bind(module, run=partial(attend_by_heads, module))
    positions = share(settings.local_length)
    if not plan.sequence_parallel:
        positions = Share(pieces_of_size(settings.local_length, most))
    rows = PiecewiseRows(positions, share, plan.tp)
    for end in (part.embedding, *part.blocks.values(), part.head):
        if isinstance(end, BoundModule):
            bind(end, run=partial(_within, rows, end.runner))


def add_in_pieces(part: Decoder, building: Building) -> None:
    """Bind to a stage for inference what has the bits of a stage in training: the sums that a plan may cut, and the
    terms of the loss. All other results have them anyway."""
    settings = building.settings
    group = building.mesh.devices.get_group("tp") if settings.plan.tp > 1 else None
    most, sums = values_of(settings).pieces, _sum_of_ranks(building)
    if most % settings.plan.tp:
        raise UserError(
            f"the run has {NAME}.pieces={most}, which tp={settings.plan.tp} does not divide; use a tp that does, or "
            "leave exact out"
        )

    def share(size: int) -> Share:
        return Share.of(pieces_of_size(size, most), group)

    for name, module in part.named_modules():
        role = role_of(name, settings.model.roles)
        if own := _sums_of_forward(role, module, share, sums):
            bind(module, **own)
        if role is Role.ROW and settings.plan.tp > 2 and group is not None:
            bind(module, over_ranks=partial(sum_over_ranks, group=group))
        elif role is Role.EXIT:
            bind(module, over_ranks=lambda whole: whole)


def _sums_of_forward(role: Role | None, module: Any, share: Callable[[int], Share], sums: Sum | None) -> dict[str, Any]:
    """Return what is bound to a module whose forward pass sums over what tensor parallelism may cut."""
    if role is Role.ROW:
        own = share(module.weight.shape[1]).number
        return {"product": _local(partial(row_product, own)), "pieces": own}
    if role is Role.INNER_ROW:
        own = share(module.weight.shape[1]).number
        return {"product": _local(partial(inner_row, own, sums)), "pieces": own}
    if role is Role.ROW_STACK:
        own = share(module.weight.shape[2]).number
        return {"product": partial(row_stack, own, sums), "pieces": own, "through": None}
    if role is Role.JOINT_NORM:
        heads = share(module.width)
        return {"product": partial(joint_norm, heads, module.width, module.eps), "pieces": heads.number}
    return {"loss": PiecewiseLoss(share(module.weight.shape[0]))} if role is Role.OUTPUT else {}


def _checked(table: Any) -> Table:
    if not isinstance(table, Table):
        raise UserError(
            f"reduce={NAME}, but the token embedding is a {type(table).__name__}; make it a dtgpt.models.layers.Table, "
            f"or use {FAST}"
        )
    return table


def _local(product: Callable[..., Any]) -> Callable[..., Any]:
    return partial(on_local_tensors, product)


def _within(rows: PiecewiseRows, run: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    with rows_summed_by(rows):
        return run(*inputs, **named)


PIECES = Entry("pieces", when=lambda made: made.masters, deed=cut_into_pieces, after="tensor parallelism")
SERVED = Entry("pieces", when=lambda made: not made.masters, deed=add_in_pieces, after="tensor parallelism")

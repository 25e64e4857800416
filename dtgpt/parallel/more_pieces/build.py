"""What a stage is given to compute in pieces, beside what `exact_tp` gives it."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from dtgpt.models.binding import bind, bound_of
from dtgpt.models.decoder import Decoder
from dtgpt.models.roles import Role, role_of
from dtgpt.parallel.build import Building, Entry
from dtgpt.parallel.exact_tp.build import Sum, collectives_of, local_product, share_of, sum_of_ranks
from dtgpt.parallel.exact_tp.tree import Share
from dtgpt.parallel.more_pieces.joint import joint_norm
from dtgpt.parallel.more_pieces.roles import WHOLE
from dtgpt.parallel.more_pieces.stacks import column_stack, inner_column, inner_row, row_stack

if TYPE_CHECKING:
    from dtgpt.parallel import tensor
    from dtgpt.parallel.more_pieces.owners import Owners


def leave_whole(table: "tensor.Table", building: Building) -> "tensor.Table":
    """Return a table whose styles leave what is between the ends of a branch whole on each rank."""
    from torch.distributed.tensor import Replicate, Shard

    from dtgpt.parallel.more_pieces.branches import WholeBranchEnd

    between = Shard(1) if building.settings.plan.sequence_parallel else Replicate()
    roles, sums = building.settings.model.roles, collectives_of(building)
    ends = {name: role is Role.ENTRY for name, role in roles.items() if role in (Role.ENTRY, Role.EXIT)}
    return {**table, **{name: WholeBranchEnd(between, sums, begins) for name, begins in ends.items()}}


def cut_into_pieces(part: Decoder, building: Building) -> None:
    """Bind the products and norms of a stage."""
    owners, share, sums = _owners(part, building), share_of(building), sum_of_ranks(building)
    of_rows = None if owners else sums
    for name, module in part.named_modules():
        role, columns = role_of(name, building.settings.model.roles), 0
        _bind_sums(role, module, share, sums, of_rows)
        if role is Role.INNER_COLUMN:
            columns = share(module.weight.shape[0]).number
            bind(module, product=local_product(partial(inner_column, columns, sums)))
        elif role is Role.COLUMN_STACK:
            columns = share(module.weight.shape[1]).number
            bind(module, product=partial(column_stack, columns, of_rows))
        elif owners and role is Role.ROW_STACK:
            from dtgpt.parallel.more_pieces.owners import sums_of_owners

            experts: Any = part.get_submodule(name.rpartition(".")[0])
            bind(experts, run=partial(sums_of_owners, experts, owners))
        if role in WHOLE and bound_of(module).sums_over_tp:
            bind(module, sums_over_tp=())


def add_in_pieces(part: Decoder, building: Building) -> None:
    """Bind to a stage for inference the sums that a plan may cut: what ends a branch has nothing left to add."""
    share, sums = share_of(building), sum_of_ranks(building)
    for name, module in part.named_modules():
        role = role_of(name, building.settings.model.roles)
        _bind_sums(role, module, share, sums, sums)
        if role is Role.EXIT:
            bind(module, over_ranks=lambda whole: whole)


def _bind_sums(
    role: Role | None, module: Any, share: Callable[[int], Share], sums: Sum | None, of_rows: Sum | None
) -> None:
    """Bind what sums in forward over what tensor parallelism may cut. sums: over the ranks; of_rows: the same of rows
    of experts, None where what calls their products adds them up."""
    if role is Role.INNER_ROW:
        own = share(module.weight.shape[1]).number
        bind(module, product=local_product(partial(inner_row, own, sums)), pieces=own)
    elif role is Role.ROW_STACK:
        own = share(module.weight.shape[2]).number
        bind(module, product=partial(row_stack, own, of_rows), pieces=own, through=None)
    elif role is Role.JOINT_NORM:
        heads = share(module.width)
        bind(module, product=partial(joint_norm, heads, module.width, module.eps), pieces=heads.number)


def _owners(part: Decoder, building: Building) -> "Owners | None":
    """Return which rank goes on with which tokens, where the rows of experts are added up for it alone: not where all
    ranks add biases to rows, or expert parallelism has other tokens' rows."""
    plan, roles = building.settings.plan, building.settings.model.roles
    stacks = [module for name, module in part.named_modules() if role_of(name, roles) is Role.ROW_STACK]
    if not plan.sequence_parallel or plan.ep > 1 or not stacks or any(each.bias is not None for each in stacks):
        return None
    from torch.distributed.tensor import Shard

    from dtgpt.parallel.more_pieces.owners import Owners
    from dtgpt.parallel.tensor import ActivationLayout

    peers, mesh = collectives_of(building), building.mesh.devices["tp"]
    return Owners(*(ActivationLayout(mesh, Shard(dim), peers) for dim in (0, 1)))


TRAINED = Entry("more pieces", when=lambda made: made.masters, deed=cut_into_pieces, after="pieces")
SERVED = Entry("more pieces", when=lambda made: not made.masters, deed=add_in_pieces, after="pieces")

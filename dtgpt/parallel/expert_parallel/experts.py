"""Experts of a stage, of which each of ep neighbouring ranks of data holds some."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from dtgpt.models.binding import bind
from dtgpt.models.decoder import Decoder
from dtgpt.models.moe.mixture import Experts
from dtgpt.parallel.build import Building, Entry, shard_module
from dtgpt.parallel.expert_parallel.exchange import SpreadExperts
from dtgpt.parallel.expert_parallel.gathered import Group, bind_gathered
from dtgpt.parallel.gradients import choose_sums
from dtgpt.util.torch_private import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXIS = "ep"


def _experts_of(part: Decoder) -> Iterator[Experts]:
    return (module for module in part.modules() if isinstance(module, Experts))


def _grid(made: Building) -> "DeviceMesh":
    assert made.mesh.own_devices is not None
    return made.mesh.own_devices


def spread_weights(part: Decoder, made: Building) -> None:
    """Leave this rank its matrices of each stack, whole or what tensor parallelism has left of them."""
    from torch.distributed.tensor import DTensor, Shard

    grid = _grid(made)
    place, ranks = grid.get_local_rank(AXIS), grid[AXIS].size()
    for stack in (stack for experts in _experts_of(part) for stack in experts.children()):
        for name, whole in list(stack.named_parameters(recurse=False)):
            cut = list(whole.placements) if is_dtensor(whole) else []
            local = (whole.to_local() if is_dtensor(whole) else whole).detach().chunk(ranks)[place].contiguous()
            mesh = grid[(AXIS, "tp")] if cut else grid[AXIS]
            held = DTensor.from_local(local, mesh, [Shard(0), *cut], run_check=False)
            setattr(stack, name, nn.Parameter(held, requires_grad=whole.requires_grad))


def send_rows(part: Decoder, made: Building) -> None:
    """Let the ranks that hold experts get the tokens of all, or where the host may ask the rows of their experts."""
    group, apart = _grid(made).get_group(AXIS), choose_sums(made.settings).orderless
    known = Group(group.size(), group.rank(), group.group_name)
    for experts in _experts_of(part):
        if made.settings.plan.asks_host:
            asked = SpreadExperts(experts.products, group, apart)
            bind(experts, run=partial(experts.of_tokens, run=asked))
        else:
            bind_gathered(experts, known, apart)


def shard_experts(part: Decoder, made: Building) -> None:
    """Let ZeRO cut experts over the ranks that hold the same ones, before it cuts the rest of each block."""
    plan, ranks = made.settings.plan, _grid(made)["shard"]
    for experts in _experts_of(part) if plan.zero else ():
        shard_module(experts, ranks, made.settings.dtype, plan.reshards)


def _spreads(made: Building) -> bool:
    return made.mesh.own_devices is not None


WEIGHTS = Entry("weights of experts", when=_spreads, deed=spread_weights, after="tensor parallelism")
ROWS = Entry("rows of experts", when=_spreads, deed=send_rows, after="weights of experts", runs=True)
ZERO = Entry("ZeRO of experts", when=_spreads, deed=shard_experts, before="ZeRO")

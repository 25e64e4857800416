"""Context parallelism: each rank computes a slice of the tokens of every sample, and inside attention some heads of all
tokens, or of some queries (`dtgpt.parallel.context_parallel.exchange`).

The core itself runs as on one process. Dropout masks are those of one process, and so are each head's bits where each
rank has all queries of its heads.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.config.plan import ResolvedPlan
from dtgpt.models.binding import bind
from dtgpt.models.decoder import Decoder
from dtgpt.models.inventory import inventory
from dtgpt.models.layers import AttentionCore, Dropout
from dtgpt.models.roles import Role, role_of
from dtgpt.parallel.build import Building, Entry
from dtgpt.parallel.context_parallel import exchange
from dtgpt.parallel.context_parallel.degrees import ranks_of_heads
from dtgpt.parallel.context_parallel.exchange import HeadExchange, QueryExchange
from dtgpt.parallel.layout import degrees_of_heads
from dtgpt.parallel.mesh import Mesh, RankCoordinates
from dtgpt.parallel.shared_memory.all_to_all import TokenExchange
from dtgpt.parallel.shared_memory.arena import share
from dtgpt.parallel.shared_memory.barrier import Barrier


def exchange_heads(part: Decoder, group: dist.ProcessGroup | None, plan: ResolvedPlan) -> None:
    """Let the attention cores of a stage compute whole samples for ranks that have slices."""
    assert group is not None
    heads = ranks_of_heads(plan, part.config)
    for module in part.modules():
        if isinstance(module, AttentionCore):
            whole = heads == plan.cp
            bind(module, run=HeadExchange(module, group) if whole else QueryExchange(module, group, heads))


def share_exchange(settings: Settings, mesh: Mesh) -> None:
    """Let the ranks that exchange tokens for heads do so through memory that they share, where they can, until the
    process group ends. All ranks take part."""
    model, plan = settings.model, settings.plan
    if mesh.cp_group is None or mesh.cp_group.group_name in exchange.shared or ranks_of_heads(plan, model) < plan.cp:
        return
    sizes = token_bytes(settings), settings.local_length, plan.cp
    areas = share(mesh, mesh.cp_group, [TokenExchange.bytes(*sizes), Barrier.bytes(plan.cp)])
    if areas is None:
        return
    name = mesh.cp_group.group_name
    exchange.shared[name] = TokenExchange(areas[0], Barrier(areas[1]))

    def release() -> None:
        exchange.shared.pop(name, None)  # later groups may have the same name

    mesh.before_end.append(release)


def token_bytes(settings: Settings) -> int:
    """Return the bytes of the queries, keys and values of a token of each sample of a micro-batch that a rank sends to
    another one, in the block that has most."""
    plan, heads = settings.plan, settings.model.num_heads
    cores = inventory(settings.model).kinds_of_cores()
    numbers = max((heads + 2 * core.kv_heads) * core.head_dim for core in cores) // plan.tp // plan.cp
    return settings.micro_batch_size * numbers * settings.dtype.itemsize


def place_dropout(part: Decoder, settings: Settings, place: RankCoordinates) -> None:
    """Give each dropout site the global index of the first token, or of the first head, that it gets on this rank. It
    adds to what tensor parallelism has set."""
    config, plan = settings.model, settings.plan
    degrees = degrees_of_heads(config, plan)
    for name, module in part.named_modules():
        if not isinstance(module, Dropout):
            continue
        role, before = role_of(name, config.roles), module.bound.start or (0, 0, 0)
        if role is Role.STREAM_DROPOUT:
            bind(module, start=(before[0] + place.cp * settings.local_length, 0))
        elif role is Role.HEAD_DROPOUT:
            ranks = ranks_of_heads(plan, config)
            heads = config.num_heads // degrees[int(name.split(".")[1])] // ranks
            bind(module, start=(before[0] + place.cp % ranks * heads, 0, 0))
        else:
            raise ValueError(f"{name} has no role of a dropout site, which context parallelism needs")


@contextmanager
def whole_samples(stages: Sequence[Decoder]) -> Iterator[None]:
    """Let every rank compute all tokens of the samples that it is given while the context lasts."""
    modules = (module for stage in stages for module in stage.modules() if isinstance(module, AttentionCore))
    bound = [(core, core.bound.run) for core in modules if isinstance(core.bound.run, HeadExchange)]
    for core, run in bound:
        bind(core, run=run.attend)
    try:
        yield
    finally:
        for core, run in bound:
            bind(core, run=run)


def mean_over_slices(mesh: Mesh, values: Tensor) -> Tensor:
    """Return the mean over the ranks that share samples, in place: of losses of slices those of samples."""
    if mesh.cp_group is not None:
        dist.all_reduce(values, group=mesh.cp_group)
        values /= mesh.plan.cp
    return values


def _place_heads(part: Decoder, made: Building) -> None:
    share_exchange(made.settings, made.mesh)
    exchange_heads(part, made.mesh.cp_group, made.settings.plan)


# Behind tensor parallelism, to whose places of dropout it adds.
DROPOUT = Entry(
    "dropout of slices",
    when=lambda made: made.settings.plan.cp > 1,
    deed=lambda part, made: place_dropout(part, made.settings, made.mesh.place),
    after="added modules",
)
# Around what selective recomputation repeats, so that no message is sent again.
HEADS = Entry(
    "heads of slices",
    when=lambda made: made.settings.plan.cp > 1,
    deed=_place_heads,
    after="attention",
    runs=True,
)

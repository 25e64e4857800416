"""The report of `dtgpt plan --rank`: one rank of a plan as it was built, beside what planning says of it."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from dtgpt.config.execution import Settings
from dtgpt.parallel.coordinates import RankCoordinates
from dtgpt.planning.memory import memory_of
from dtgpt.planning.report import GIB, SHORT, find_device, verdict
from dtgpt.train.one_rank import BuiltParameter, BuiltRank, planned_bytes
from dtgpt.util.console import byte_size, counted, hanging

LISTED = 8  # ranks of a group that are named one by one
TOLD = 10  # differences


def describe_rank(built: BuiltRank, settings: Settings, gpus_per_node: int, gpu: str | None) -> list[str]:
    """Return the lines of the report, without the verdict of `describe_check`."""
    lines = ["", *_coordinates(built, settings, gpus_per_node), *_groups(built, settings, gpus_per_node)]
    return [*lines, "", *_parameters(built.parameters), "", *_memory(built, settings, gpu)]


def describe_check(found: list[str], built: BuiltRank) -> list[str]:
    """Return the lines that say whether the rank is as planned, by the sentences of `differences`."""
    count = counted(len(built.parameters), "parameter")
    if not found:
        return [f"as planned: blocks, process groups, {count}, weights, gradients and moments"]
    lines = [hanging(f"  {sentence}", 4) for sentence in found[:TOLD]]
    return ["DIFFERS from the plan:", *lines, *[f"  and {len(found) - TOLD} more"] * (len(found) > TOLD)]


def _coordinates(built: BuiltRank, settings: Settings, gpus_per_node: int) -> list[str]:
    place, plan = built.place, settings.plan
    node, gpu = divmod(place.rank, gpus_per_node)
    stages = [f"{stage} (blocks {_span(blocks)})" for stage, blocks in zip(place.stages, built.blocks, strict=True)]
    lines = [
        f"rank    {place.rank} of {plan.world:,}: pp {place.pp} of {plan.pp}, dp {place.dp} of {plan.dp}, "
        f"tp {place.tp} of {plan.tp}; node {node}, GPU {gpu} of {gpus_per_node}",
        f"stages  {', '.join(stages)} of {plan.num_stages}",
    ]
    return [hanging(line, 8) for line in lines]


def _groups(built: BuiltRank, settings: Settings, gpus_per_node: int) -> list[str]:
    place, lines = built.place, []
    for name, ranks in built.groups.items():
        if name == "ends" and not settings.model.tied:
            continue
        label = "tied table" if name == "ends" else name
        nodes = sorted({rank // gpus_per_node for rank in ranks})
        where = f"node {nodes[0]}" if len(nodes) == 1 else f"{counted(len(nodes), 'node')}"
        beside = f"; {_neighbours(place)}" if name == "pp" else ""
        lines.append(f"{label:<12}{counted(len(ranks), 'rank')}: {_ranks(ranks)}; {where}{beside}")
    return [hanging(line, 12) for line in ["", "process groups", *lines]] if lines else ["", "no process groups"]


def _neighbours(place: RankCoordinates) -> str:
    """Return the ranks with which the stages of this one exchange activations."""
    sources = {place.rank_of(stage - 1) for stage in place.stages} - {None}
    targets = {place.rank_of(stage + 1) for stage in place.stages} - {None}
    words = []
    for verb, ranks in (("receives from", sources), ("sends to", targets)):
        if ranks:
            words.append(f"{verb} {_listed(place.neighbour(pp) for pp in ranks if pp is not None)}")
    return ", ".join(words)


def _listed(numbers: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) <= LISTED:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"


def _span(blocks: Sequence[int]) -> str:
    return f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else str(blocks[0])


def _parameters(parameters: list[BuiltParameter]) -> list[str]:
    """Return a line for each kind of parameter: blocks whose parameters have the same shapes share it."""
    kinds: Counter[tuple[str, ...]] = Counter()
    for p in parameters:
        pattern = re.sub(r"^blocks\.[0-9]+\.", "blocks.*.", p.name)
        kinds[pattern, _shape(p.whole), _shape(p.local), p.placement or "replicated"] += 1
    rows = [["parameters", "number", "whole", "on this rank", "dimension cut"]]
    rows += [[pattern, f"{number}", *columns] for (pattern, *columns), number in kinds.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _memory(built: BuiltRank, settings: Settings, gpu: str | None) -> list[str]:
    """Return the bytes, built and planned, and the planned ones of the fullest moment, which building does not show."""
    expected, most = planned_bytes(settings, built.place.rank), memory_of(settings, built.place.rank)
    unit, name = (GIB, "GiB") if most.total >= GIB else (GIB / 1024, "MiB")
    lines = [f"{f'{name} on this rank':<20}{'built':>10}{'planned':>10}"]
    for what, here in built.bytes().items():
        lines.append(f"{what:<20}{here / unit:>10.3f}{expected[what] / unit:>10.3f}")
    if built.padding:
        lines.append(f"buckets of gradients hold {byte_size(built.padding)} of padding beside")
    parts = ", ".join(f"{SHORT.get(what, what)} {n / unit:.2f}" for what, n in vars(most).items() if n)
    lines.append(hanging(f"fullest moment of a step, planned: {parts}", 2))
    return [*lines, verdict(most.total, *find_device(gpu), "this rank")]

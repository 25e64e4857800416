"""Every transport in shared memory against NCCL, or on CPUs gloo, bit for bit. Kernels and streams need two GPUs."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.config.plan_choice import parse_plan
from dtgpt.ops.kernels.decode.exchange import CAPACITY
from dtgpt.ops.optim.fixed_point import Range, add_integers, add_rounded
from dtgpt.parallel.collectives import FlatSum, GroupCollectives, flat_length
from dtgpt.parallel.launch import end_process_group, start_process_group
from dtgpt.parallel.layout import chunk
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.narrow_sums.sums import NarrowSum
from dtgpt.parallel.shared_memory import pieces
from dtgpt.parallel.shared_memory.all_to_all import TokenExchange
from dtgpt.parallel.shared_memory.arena import Area, aligned, share
from dtgpt.parallel.shared_memory.barrier import Barrier
from dtgpt.parallel.shared_memory.collectives import KernelCollectives, area_bytes, make_collectives
from dtgpt.parallel.shared_memory.gather import CopyGather
from dtgpt.parallel.shared_memory.message import open_messages
from dtgpt.parallel.shared_memory.reduce import CopySum, open_sums
from dtgpt.parallel.shared_memory.scatter import CopyScatter
from dtgpt.parallel.shared_memory.transport import make_exchange
from dtgpt.util.peers import Process
from tests.support.bodies_pushes import shared_files
from tests.support.gpus import delay, run_on_two_gpus
from tests.support.ranks import pool

EIGHT_BITS = torch.float8_e4m3fn
PART, PROGRAMS = 1 << 20, 48  # bytes
TURNS = {"cpu": 3, "cuda": 100}
SHAPES = [
    (torch.bfloat16, (3, 128, 96)), (torch.bfloat16, (1, 2, 8)), (torch.float16, (5, 2, 1000)),
    (torch.float32, (2, 4, 52)), (torch.bfloat16, (7, 254, 264)),
]  # fmt: skip


class Case(NamedTuple):
    """Calls of a transport, and the same by collectives of the process group."""

    inputs: list[Tensor]  # filled with other numbers on each rank in each turn
    work: Callable[[], list[Tensor]]
    expected: Callable[[], list[Tensor]]


def everyones(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    made = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(made, x, group=group)
    return made


def total(x: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    """The sum over the ranks, in fp32 and in their order, rounded once."""
    return sum(one.float() for one in everyones(x, group)).to(dtype)


def by_kernels(mesh: Mesh, group: dist.ProcessGroup, name: str) -> Case:
    made = make_collectives(mesh, group, group.size() * PART, PROGRAMS)
    assert made is not None
    calls = []
    for dtype, shape in SHAPES:
        x = torch.empty(shape, dtype=dtype, device=mesh.device)
        if name == "gather":
            calls += [(x, dim) for dim in (0, 1)]
        else:
            dims = (None,) if name == "sum" else (0, 1)
            calls += [(x, dim) for dim in dims if made.takes(shape, dim, dtype.itemsize)]
    assert len(calls) > 2

    def expected(x: Tensor, dim: int | None) -> Tensor:
        if name == "gather":
            return torch.cat(everyones(x, group), dim)
        whole = total(x, group, x.dtype)
        return whole if dim is None else whole.chunk(made.ranks, dim)[made.rank]

    def work() -> list[Tensor]:
        return [made.gather(x, dim) if name == "gather" else made.sum(x, dim) for x, dim in calls]

    return Case([x for x, _ in calls], work, lambda: [expected(x, dim) for x, dim in calls])


def by_group(mesh: Mesh, group: dist.ProcessGroup) -> Case:
    made, x = GroupCollectives(group), torch.empty(4, 8, 32, device=mesh.device)

    def work() -> list[Tensor]:
        gathered = [made.gather(x, dim) for dim in (0, 1, None)]
        gathered += [made.gather(x.to(EIGHT_BITS), dim).float() for dim in (0, 1)]
        return [*gathered, *(made.sum(x.clone(), dim) for dim in (0, 1, None))]

    def expected() -> list[Tensor]:
        parts, whole = everyones(x, group), total(x, group, x.dtype)
        own = [whole.chunk(group.size(), dim)[group.rank()] for dim in (0, 1)]
        rounded = [part.to(EIGHT_BITS).float() for part in parts]
        narrow = [torch.cat(rounded, dim) for dim in (0, 1)]
        return [torch.cat(parts, 0), torch.cat(parts, 1), x, *narrow, *own, whole]

    return Case([x], work, expected)


def copied_gather(mesh: Mesh, group: dist.ProcessGroup) -> Case:
    ranks, rank = group.size(), group.rank()
    areas = share(mesh, group, [2 * ranks * 4112, Barrier.bytes(ranks)])
    assert areas is not None
    wholes = [memory.view(torch.bfloat16).view(ranks, -1) for memory in areas[0].of_ranks]
    part = torch.empty(4112, device=mesh.device)  # rounded into its place
    gather = CopyGather([part], [[whole[rank] for whole in wholes]], Barrier(areas[1]))

    def work() -> list[Tensor]:
        gather.run()
        return [wholes[rank]]

    return Case([part], work, lambda: [torch.stack(everyones(part.bfloat16(), group))])


def copied_scatter(mesh: Mesh, group: dist.ProcessGroup) -> Case:
    ranks, size = group.size(), 16 * 4111
    areas = share(mesh, group, [4 * 16 * 1001 * (ranks - 1), Barrier.bytes(ranks)])  # for several turns
    assert areas is not None
    scatter = CopyScatter(areas[0], Barrier(areas[1]))
    whole = torch.empty(ranks * size, device=mesh.device)
    narrow = torch.empty(ranks * size, device=mesh.device, dtype=torch.bfloat16)
    parts = [torch.empty(size, device=mesh.device) for _ in range(2)]

    def work() -> list[Tensor]:
        scatter.run(whole, parts[0])
        scatter.run(narrow, parts[1])
        return parts

    def expected() -> list[Tensor]:
        return [total(x, group, torch.float32).chunk(ranks)[group.rank()] for x in (whole, narrow)]

    return Case([whole, narrow], work, expected)


def exchanged_tokens(mesh: Mesh, group: dist.ProcessGroup) -> Case:
    """Heads of whole words and others, of tensors that are parts of a larger one, in 1, 2, 5, 3 and 2 turns."""
    ranks, tokens, device = group.size(), 13, mesh.device
    areas = share(mesh, group, [TokenExchange.bytes(2 * 3 * 5 * 36 * 4, 3, ranks), Barrier.bytes(ranks)])
    assert areas is not None
    made = TokenExchange(areas[0], Barrier(areas[1]))
    packed = torch.empty(3, tokens, 6 * ranks, 40, device=device, dtype=torch.bfloat16)
    whole = torch.empty(3, tokens * ranks, 5, 36, device=device)

    def heads() -> list[Tensor]:
        return [*packed.split([4 * ranks, ranks, ranks], dim=2)]

    def work() -> list[Tensor]:
        few = [x.float() for x in made.to_heads([x[..., :8] for x in heads()])]
        by_heads = made.to_heads(heads())
        by_tokens = [*made.to_tokens([whole, whole]), *made.to_tokens([whole])]
        return [*by_heads, *few, *by_tokens, *made.to_tokens(by_heads)]

    def expected() -> list[Tensor]:
        by_heads = [
            torch.cat(everyones(x.contiguous(), group), 1).chunk(ranks, 2)[group.rank()].contiguous() for x in heads()
        ]
        by_tokens = torch.cat(everyones(whole, group), 2).chunk(ranks, 1)[group.rank()].contiguous()
        few = [x[..., :8].float() for x in by_heads]
        return [*by_heads, *few, *[by_tokens] * 3, *(x.contiguous() for x in heads())]

    return Case([packed, whole], work, expected)


def flat_sums(mesh: Mesh, group: dist.ProcessGroup, kind: type[FlatSum], dtype: torch.dtype) -> Case:
    lengths = [flat_length(count, dtype, group.size()) for count in (12345, 7)]
    if kind is CopySum:
        sums = open_sums(mesh, group, [(dtype, length) for length in lengths])
    else:
        sums = [kind(torch.zeros(length, dtype=dtype, device=mesh.device), group) for length in lengths]
    inputs = [torch.empty_like(one.flat) for one in sums]

    def work() -> list[Tensor]:
        for x, one in zip(inputs, sums, strict=True):
            one.flat.copy_(x)
            one.begin()
        for one in sums:
            one.wait()
        return [one.flat for one in sums]

    return Case(inputs, work, lambda: [total(x, group, dtype) for x in inputs])


def exact_sums(mesh: Mesh, group: dist.ProcessGroup, copies: bool) -> Case:
    """Of one and of two gradients for each element, the pieces and the whole sums."""
    ranks, lengths, range_ = group.size(), [aligned(count, group.size()) for count in (12345, 7)], Range(40, 2.0**12)
    with nullcontext() if copies else mock.patch.object(pieces, "share", lambda *arguments: None):
        made = pieces.Pieces(mesh, group, 1000, lengths)  # for several turns
    inputs = [
        torch.empty(length, width, device=mesh.device, dtype=torch.bfloat16)
        for length, width in zip(lengths, (1, 2), strict=True)
    ]
    cut = torch.empty(lengths[0] // ranks, dtype=torch.int64, device=mesh.device)
    misfits = torch.zeros((), dtype=torch.int64, device=mesh.device)

    def add(own: Tensor, others: Tensor, out: Tensor, rank: int) -> None:
        add_rounded(own, others, out, range_)

    def add_integer(first: bool, own: Tensor, others: Tensor, out: Tensor, rank: int) -> None:
        add_integers(own, others, out, misfits, range_, first)

    def queue() -> None:
        for index, x in enumerate(inputs):
            made.scatter(x, made.sums[index].view(ranks, -1)[group.rank()], add)
            made.gather(index)
        for first in (True, False):
            made.scatter(inputs[0], cut, partial(add_integer, first))

    def work() -> list[Tensor]:
        misfits.zero_()
        made.start(queue, inputs)
        made.wait()
        return [*made.sums, cut, misfits > 0]

    def expected() -> list[Tensor]:
        sent = [torch.cat(everyones(x, group), 1) for x in inputs]
        sums = [(x.double().nan_to_num() * 2.0**40).trunc().sum(1).long() for x in sent]
        beyond = [x.isnan().any(1) for x in sent]
        own, unit = chunk(range(lengths[0]), ranks, group.rank()), torch.tensor(2.0**-40, device=mesh.device)
        rounded = [torch.where(nan, torch.nan, x * unit) for nan, x in zip(beyond, sums, strict=True)]
        return [*rounded, 2 * sums[0][own.start : own.stop], beyond[0][own.start : own.stop].any()]

    return Case(inputs, work, expected)


def messages(mesh: Mesh, group: dist.ProcessGroup) -> Case:
    """Two to the next rank in each step, after its signal."""
    ranks, rank, shape, places = group.size(), group.rank(), (3, 5, 64), 2
    made = open_messages(mesh, group, places, 1, shape, torch.bfloat16)
    assert made is not None
    inputs = [torch.empty(shape, device=mesh.device, dtype=torch.bfloat16) for _ in range(places)]
    target, source = (rank + 1) % ranks, (rank - 1) % ranks

    def work() -> list[Tensor]:
        made.signal(source, places)
        for index, x in enumerate(inputs):
            made.send(x, target, index, after=None if index else places)
        found = [made.receive(index).clone() for index in range(places)]
        made.flush()
        return found

    return Case(inputs, work, lambda: [everyones(x, group)[source] for x in inputs])


def exchange(mesh: Mesh, group: dist.ProcessGroup, name: str) -> Case:
    made = make_exchange(mesh, group)
    assert made is not None
    ranks, rank, device = made.ranks, made.rank, mesh.device
    generator = torch.Generator().manual_seed(0)  # the same sizes on every rank
    sizes = [[int(torch.randint(1, most, (), generator=generator)) for most in (9, 65, 1025)] for _ in range(10)]
    if name == "sum":
        parts = [torch.empty(size, device=device) for size in sizes]

        def summed(part: Tensor) -> Tensor:
            own = part[0].clone()
            for more in part[1:]:
                own += more
            return total(own, group, torch.float32)[None]

        assert made.sum(parts[0].new_empty(1, 1, CAPACITY + 1)) is None
        return Case(parts, lambda: [made.sum(part) for part in parts], lambda: [summed(part) for part in parts])
    if name == "gather":
        columns = [rows * ranks + turn % ranks for turn, (_, rows, _) in enumerate(sizes)]
        widths = [-(-whole // ranks) for whole in columns]
        columns = [max(whole, (ranks - 1) * width + 1) for whole, width in zip(columns, widths, strict=True)]
        padded = [
            torch.empty(size[2] % 64 + 1, width, device=device) for size, width in zip(sizes, widths, strict=True)
        ]
        calls = list(zip(padded, columns, widths, strict=True))

        def work() -> list[Tensor]:
            return [made.gather(x[:, : whole - rank * width].contiguous(), whole) for x, whole, width in calls]

        return Case(padded, work, lambda: [torch.cat(everyones(x, group), 1)[:, :whole] for x, whole, _ in calls])
    tables = [torch.empty(rows, 2 * columns, device=device, dtype=torch.bfloat16) for _, rows, columns in sizes]
    ids = [
        torch.randint(len(table) * ranks, (table.shape[1] // 2 % 100 + 1,), generator=generator).to(device)
        for table in tables
    ]
    looked_up = list(zip(ids, tables, strict=True))
    return Case(
        tables,
        lambda: [made.look_up(rows, table, rank * len(table)) for rows, table in looked_up],
        lambda: [torch.cat(everyones(table, group))[rows] for rows, table in looked_up],
    )


HOSTS = {
    "activations by the process group": by_group,
    "fp32 sum by the process group": lambda mesh, group: flat_sums(mesh, group, FlatSum, torch.float32),
    "16-bit sum by the process group": lambda mesh, group: flat_sums(mesh, group, NarrowSum, torch.bfloat16),
    "16-bit sum by copies": lambda mesh, group: flat_sums(mesh, group, CopySum, torch.bfloat16),
    "gather by copies": copied_gather,
    "scatter by copies": copied_scatter,
    "tokens for heads by copies": exchanged_tokens,
    "exact sums by the process group": lambda mesh, group: exact_sums(mesh, group, copies=False),
    "exact sums by copies": lambda mesh, group: exact_sums(mesh, group, copies=True),
}
GPUS = HOSTS | {
    "gather by kernels": lambda mesh, group: by_kernels(mesh, group, "gather"),
    "scatter by kernels": lambda mesh, group: by_kernels(mesh, group, "scatter"),
    "sum by kernels": lambda mesh, group: by_kernels(mesh, group, "sum"),
    "messages by copies": messages,
    "exchanged sum": lambda mesh, group: exchange(mesh, group, "sum"),
    "exchanged columns": lambda mesh, group: exchange(mesh, group, "gather"),
    "exchanged rows": lambda mesh, group: exchange(mesh, group, "look_up"),
}


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    integer = {1: torch.bool, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.itemsize]
    both_nan = ours.isnan() & theirs.isnan()
    return bool((both_nan | (ours.view(integer) == theirs.view(integer))).all())


def differences(mesh: Mesh, case: Case, run: Callable[[], list[Tensor]]) -> list[int]:
    """The turns in which a transport did not have the bits of the process group, where one rank is late now and then
    and NaN is among the numbers."""
    wrong = []
    for turn in range(TURNS[mesh.device.type]):
        torch.manual_seed(mesh.world * turn + mesh.rank)
        for x in case.inputs:
            x.normal_()
            x.view(-1)[0] = torch.nan
        delay(mesh, turn)
        found = [x.clone() for x in run()]
        if not all(same_bits(*pair) for pair in zip(found, case.expected(), strict=True)):
            wrong.append(turn)
    return wrong


def compare(name: str, device: torch.device, folder: Path | None = None) -> dict[str, list[int]]:
    """`differences` of a transport, as one of the ranks: as it is called, and on a GPU replayed from a CUDA graph."""
    world = dist.get_world_size()
    mesh = Mesh(parse_plan(f"tp{world}", {}).for_world(world), device)
    with shared_files(folder) if folder else nullcontext():
        case = GPUS[name](mesh, mesh.tp_group)
        found = {"called": differences(mesh, case, case.work)}
    if device.type == "cuda" and "process group" not in name:
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                outputs = case.work()

            def replay() -> list[Tensor]:
                graph.replay()
                return outputs

            found["replayed"] = differences(mesh, case, replay)
        torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("name", HOSTS)
def test_a_transport_has_the_bits_of_gloo(tmp_path, name):
    for found in pool().run(2, compare, name, torch.device("cpu"), tmp_path):
        assert found == {"called": []}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict[str, list[int]]]:
    folder = tmp_path_factory.mktemp("transports")
    run_on_two_gpus(folder, "from tests.parallel.shared_memory.test_transports import check; check()")
    return json.loads((folder / "outcomes.json").read_text())


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", GPUS)
def test_a_transport_has_the_bits_of_nccl(outcomes, name):
    assert outcomes[name] and not any(outcomes[name].values()), outcomes[name]


def check() -> None:
    """Compare all transports, as one of the ranks under torchrun."""
    process = Process.from_environment()
    device = torch.device("cuda", process.local_rank)
    start_process_group(device, 120.0)
    found = {name: compare(name, device) for name in GPUS}
    every: list[dict] = [{} for _ in range(process.world)]
    dist.all_gather_object(every, found)
    if process.rank == 0:
        merged = {
            name: {way: [turn for theirs in every for turn in theirs[name][way]] for way in ways}
            for name, ways in found.items()
        }
        Path("outcomes.json").write_text(json.dumps(merged))
    end_process_group()


@pytest.mark.parametrize(
    "whole, dim, fits",
    [
        ((8, 512, 256), 1, True),
        ((8, 514, 256), 1, False),  # more than the memory
        ((2, 8, 6), 1, True),  # a row of a part has 48 bytes
        ((2, 4, 6), 1, False),  # of 24
        ((4, 2, 6), 0, True),
        ((3, 4, 16), 0, False),  # parts of two sizes
        ((0, 2, 6), 1, False),
        ((2, 8, 6), None, True),  # flat: parts of 96 bytes
        ((3, 7), None, False),
    ],
)
def test_parts_that_fit_in_whole_words_are_taken(whole, dim, fits):
    memory = torch.zeros(area_bytes(PART, ranks=2), dtype=torch.uint8)
    flags = torch.zeros(Barrier.bytes(2, PROGRAMS), dtype=torch.uint8)
    barrier = Barrier(Area((flags, flags), rank=0), PROGRAMS)
    assert KernelCollectives(Area((memory, memory), rank=0), barrier, PART).takes(whole, dim, itemsize=2) == fits

"""Ranks that gather and sum through each other's memory, against NCCL, bit for bit. The kernels need two GPUs."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.config.plan_names import parse_plan
from dtgpt.ops.collectives.peers import Peers, bytes_for
from dtgpt.ops.collectives.pushes import Meeting, PushedGather, PushedScatter, PushedSum, meeting_bytes
from dtgpt.parallel.launch import end_process_group, start_process_group
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.symmetric import share_peers, symmetric_memory
from dtgpt.util.process import Process
from tests.ops.test_exchange import delay, run_on_two_gpus

PART, PROGRAMS = 1 << 20, 48  # bytes
PROGRAM = "from tests.ops.test_peers import check; check()"
SHAPES = [
    (torch.bfloat16, (3, 128, 96)), (torch.bfloat16, (1, 2, 8)), (torch.float16, (5, 2, 1000)),
    (torch.float32, (2, 4, 52)), (torch.bfloat16, (7, 254, 264)),
]  # fmt: skip


def peers(ranks: int = 2) -> Peers:
    memory = torch.zeros(bytes_for(PART, ranks, PROGRAMS), dtype=torch.uint8)
    return Peers([memory.data_ptr()] * ranks, 0, memory, PART, PROGRAMS)


@pytest.mark.parametrize(
    "part, dim, fits",
    [
        ((8, 256, 256), 1, True),
        ((8, 257, 256), 1, False),  # more than the memory
        ((2, 4, 6), 1, True),  # a row of 48 bytes
        ((2, 2, 6), 1, False),  # of 24
        ((2, 2, 6), 0, True),
        ((0, 2, 6), 1, False),
    ],
)
def test_parts_that_fit_in_whole_words_are_taken(part, dim, fits):
    assert peers().takes(part, dim, itemsize=2) == fits


def test_the_memory_of_areas_and_flags():
    assert bytes_for(PART, 4, PROGRAMS) == 8 * PART + 4 * PROGRAMS * 4


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_gather_and_sum_what_nccl_would(tmp_path):
    run_on_two_gpus(tmp_path, PROGRAM)


def check() -> None:
    """Run all checks, as one of the ranks."""
    process = Process.from_environment()
    device = torch.device("cuda", process.local_rank)
    start_process_group(device, 120.0)
    ranks = process.world
    mesh = Mesh(parse_plan(f"tp{ranks}", {}).for_world(ranks), device)
    made = share_peers(mesh, mesh.tp_group, ranks * PART, PROGRAMS)
    assert made is not None and mesh.tp_group is not None
    for turn in range(200):
        dtype, shape = SHAPES[turn % len(SHAPES)]
        whole = torch.randn(shape, device=device).to(dtype)
        delay(mesh.rank, turn)
        check_turn(made, whole, turn % 3 % 2, mesh.tp_group)
    check_replays(made, mesh)
    check_pushed(mesh)
    end_process_group()


def check_pushed(mesh: Mesh) -> None:
    """Sums, gathers and scatters by copies, captured and replayed, of numbers that round."""
    ranks, group = mesh.world, mesh.tp_group
    numel = 16 * ranks * 4111
    sizes = [PushedSum.bytes(2 * numel, ranks), 2 * numel, 4 * 16 * 1001, *[meeting_bytes(ranks)] * 3]
    shared = symmetric_memory(mesh, group, sum(sizes), usable=True)
    assert shared is not None and group is not None
    cut = list(zip(*(memory.split(sizes) for memory in shared.of_ranks), strict=True))
    del shared  # what is made of it keeps it
    meetings = [Meeting(flags, mesh.rank) for flags in cut[3:]]
    summed = PushedSum(cut[0], 2 * numel, torch.bfloat16, meetings[0])
    wholes = [memory.view(torch.bfloat16) for memory in cut[1]]
    gathered_part = torch.zeros(numel // ranks, device=mesh.device, dtype=torch.bfloat16)
    places = [whole.view(ranks, -1)[mesh.rank] for whole in wholes]
    gathered = PushedGather([gathered_part], [places], meetings[1])
    scattered = PushedScatter(cut[2], meetings[2])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros(numel, device=mesh.device, dtype=torch.bfloat16)
        y = torch.zeros(numel, device=mesh.device)
        whole, part = wholes[mesh.rank], torch.empty(numel // ranks, device=mesh.device)
        graph = torch.cuda.CUDAGraph()

        def work() -> None:
            summed.flat.copy_(x)
            summed.run()
            gathered_part.copy_(x.view(ranks, -1)[mesh.rank])
            gathered.run()
            scattered.run(y, part)

        work()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
        for turn in range(200):
            torch.manual_seed(ranks * turn + mesh.rank)
            x.normal_()
            y.normal_()
            delay(mesh.rank, turn)
            graph.replay()
            found = [summed.flat.clone(), whole.clone(), part.clone()]
            everyone = [torch.empty_like(x) for _ in range(ranks)]
            dist.all_gather(everyone, x, group=group)
            wide = [torch.empty_like(y) for _ in range(ranks)]
            dist.all_gather(wide, y, group=group)
            expected = [
                sum(one.float() for one in everyone).to(x.dtype),
                torch.cat([one.view(ranks, -1)[rank] for rank, one in enumerate(everyone)]),
                sum(one.view(ranks, -1)[mesh.rank] for one in wide),
            ]
            for name, a, b in zip(("sum", "gather", "scatter"), found, expected, strict=True):
                assert torch.equal(a, b), (name, turn)
    torch.cuda.current_stream().wait_stream(stream)


def check_turn(made: Peers, whole: Tensor, dim: int, group: dist.ProcessGroup) -> None:
    """`whole` has other numbers on each rank. Of two ranks, fp32 sums rounded once are those of any order."""
    everyone = [torch.empty_like(whole) for _ in range(made.ranks)]
    dist.all_gather(everyone, whole, group=group)
    expected = sum(one.float() for one in everyone).to(whole.dtype)
    assert torch.equal(made.gather(whole, dim), torch.cat(everyone, dim))
    if whole.shape[dim] % made.ranks == 0:
        part = expected.chunk(made.ranks, dim)[made.rank]
        found = made.sum_part(whole, dim)
        assert torch.equal(found, part) and found.is_contiguous()
    if whole.numel() // made.ranks * whole.itemsize % 16 == 0:
        assert torch.equal(made.sum(whole), expected)


def check_replays(made: Peers, mesh: Mesh) -> None:
    """A captured chain of collectives, replayed with new numbers beside a rank that is late now and then."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros(4, 64, 256, device=mesh.device, dtype=torch.bfloat16)
        work = lambda: made.sum(made.gather(made.sum_part(x, 1), 1))  # noqa: E731
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = work()
        for turn in range(300):
            torch.manual_seed(turn)
            x.copy_(torch.randint(-8, 8, x.shape, device=mesh.device))  # the same numbers on every rank
            delay(mesh.rank, turn)
            graph.replay()
            assert torch.equal(found, made.ranks**2 * x), turn
    torch.cuda.current_stream().wait_stream(stream)

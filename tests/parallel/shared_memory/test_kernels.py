"""Kernels and copies of one rank on one GPU, whose peer has already come to every barrier and left what it sends."""

import pytest
import torch
from torch import Tensor

from dtgpt.ops.kernels.decode import exchange
from dtgpt.ops.kernels.extension import library
from dtgpt.parallel.shared_memory.arena import Area
from dtgpt.parallel.shared_memory.barrier import FLAG, Barrier
from dtgpt.parallel.shared_memory.collectives import KernelCollectives, area_bytes
from dtgpt.parallel.shared_memory.gather import CopyGather
from dtgpt.parallel.shared_memory.message import Messages
from dtgpt.parallel.shared_memory.scatter import CopyScatter, add

pytestmark = pytest.mark.cuda
RANKS, PART, PROGRAMS = 2, 1 << 17, 4
FAR = 1 << 30  # more calls than any test makes
SHAPES = [(torch.bfloat16, (4, 128, 96)), (torch.float32, (2, 4, 52)), (torch.float16, (6, 2, 1000))]


def area(size: int) -> Area:
    """An area of this rank, rank 0, and of its peer, on the same GPU."""
    return Area(tuple(torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(RANKS)), rank=0)


def barrier(programs: int = 1) -> tuple[Barrier, Area]:
    flags = area(Barrier.bytes(RANKS, programs))
    flags.own.view(torch.int32).fill_(FAR)
    return Barrier(flags, programs), flags


def test_a_barrier_tells_the_peer_how_often_this_rank_has_come():
    gate, flags = barrier()
    for call in (1, 2, 3):
        gate.wait()
        assert flags.of_ranks[1].view(torch.int32).tolist() == [call, 0]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("dtype", "shape"), SHAPES, ids=str)
def test_a_gather_and_a_sum_of_parts(dtype, shape, dim):
    memory, (gate, _) = area(area_bytes(PART, RANKS)), barrier(PROGRAMS)
    made = KernelCollectives(memory, gate, PART)

    def places(memory: Tensor, source: int) -> list[Tensor]:
        halves = memory.view(dtype).view(2, RANKS, -1)
        return [half[source] for half in halves]

    def leave(part: Tensor) -> None:
        for place in places(memory.own, source=1):
            place[: part.numel()].copy_(part.reshape(-1))

    ours, theirs = (torch.randn(shape, device="cuda").to(dtype) for _ in range(RANKS))
    leave(theirs)
    assert torch.equal(made.gather(ours, dim), torch.cat([ours, theirs], dim))
    sent = places(memory.of_ranks[1], source=0)[1]  # of the first call
    assert torch.equal(sent[: ours.numel()], ours.view(-1))
    if dtype == torch.bfloat16:  # bytes, in another call
        narrow = [part.to(torch.float8_e4m3fn).view(torch.uint8) for part in (ours, theirs)]
        memory.own.view(2, RANKS, -1)[:, 1, : theirs.numel()] = narrow[1].view(-1)
        found = made.gather(narrow[0].view(torch.float8_e4m3fn), dim)
        assert found.dtype == torch.float8_e4m3fn and torch.equal(found.view(torch.uint8), torch.cat(narrow, dim))
    leave(theirs.chunk(RANKS, dim)[0])
    total = (ours.float() + theirs.float()).to(dtype)
    assert torch.equal(made.sum(ours, dim), total.chunk(RANKS, dim)[0])


@pytest.mark.parametrize("rank", [0, 2])
def test_what_came_is_added_in_the_order_of_the_ranks(rank):
    own, others = torch.randn(10001, device="cuda"), torch.randn(2, 10001, device="cuda")
    found = torch.empty_like(own)
    add(own, others, found, rank)
    in_order = [*others[:rank], own, *others[rank:]]
    assert torch.equal(found, in_order[0] + in_order[1] + in_order[2])


def test_copies_gather_and_scatter():
    weights, part = area(RANKS * 512), torch.randn(128, device="cuda")
    wholes = [memory.view(torch.bfloat16).view(RANKS, -1)[:, :128] for memory in weights.of_ranks]
    CopyGather([part], [[whole[0] for whole in wholes]], barrier()[0]).run()
    assert all(torch.equal(whole[0], part.bfloat16()) for whole in wholes)

    room, whole, found = area(512), torch.randn(RANKS * 128, device="cuda"), torch.empty(128, device="cuda")
    theirs = torch.randn(128, device="cuda")
    room.own.view(torch.float32).copy_(theirs)
    CopyScatter(room, barrier()[0]).run(whole, found)
    assert torch.equal(found, whole[:128] + theirs)
    assert torch.equal(room.of_ranks[1].view(torch.float32), whole[128:])


def test_a_message_waits_for_its_signal_and_leaves_its_flag_as_it_was():
    flags, places, shape = area(3 * FLAG), area(2 * 1024), (4, 64)
    made = Messages(flags, places, shape, torch.bfloat16)
    for _ in range(3):  # to this rank itself
        sent = [torch.randn(shape, device="cuda").bfloat16() for _ in range(2)]
        made.signal(0, 2)
        for index, message in enumerate(sent):
            made.send(message, 0, index, after=None if index else 2)
        found = [made.receive(index).clone() for index in range(2)]
        made.flush()
        assert all(torch.equal(*pair) for pair in zip(found, sent, strict=True))
        assert flags.own.view(torch.int32).tolist() == [0, 0, 0]


def test_an_exchange_sums_and_gathers():
    built = library(exchange.SOURCE, torch.device("cuda"), instead="NCCL", structs=exchange.STRUCTS)
    if built is None:
        pytest.skip("needs nvcc")
    memory = area(exchange.bytes_of(RANKS))
    made = exchange.Exchange(built, memory.of_ranks, memory.rank)

    def leave(numbers: Tensor, flag: int) -> None:
        """Words of the peer: fp32 numbers in the lower half, the flag in the upper one."""
        words = memory.own.view(torch.int32).view(2, RANKS, exchange.CAPACITY, 2)[flag % 2, 1, : numbers.numel()]
        words[:, 0] = numbers.reshape(-1).view(torch.int32)
        words[:, 1] = flag

    for flag in (1, 2):
        parts, theirs = torch.randn(3, 5, 64, device="cuda"), torch.randn(5, 64, device="cuda")
        leave(theirs, flag)
        assert torch.equal(made.sum(parts), (parts[0] + parts[1] + parts[2] + theirs)[None])
    ours, theirs = torch.randn(5, 32, device="cuda"), torch.randn(5, 31, device="cuda")
    leave(theirs, 3)
    assert torch.equal(made.gather(ours, 63), torch.cat([ours, theirs], dim=1))

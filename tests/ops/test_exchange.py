"""Tensor-parallel ranks that write to each other's memory, against NCCL, bit for bit. Needs two GPUs."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.config.plan_choice import parse_plan
from dtgpt.ops.kernels.decode.blocks import run_blocks
from dtgpt.ops.kernels.decode.exchange import Exchange
from dtgpt.ops.kernels.decode.weights import BlockWeights
from dtgpt.parallel.launch import end_process_group, start_process_group
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shared_memory.transport import make_exchange
from dtgpt.util.peers import Process
from tests.ops.test_decode import SHAPES, random, weights
from tests.support.gpus import delay, run_on_two_gpus

pytestmark = pytest.mark.cuda
LENGTH, REPLAYS = 384, 1000
PROGRAM = "from tests.ops.test_exchange import check; check()"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_exchange_what_nccl_would(tmp_path):
    run_on_two_gpus(tmp_path, PROGRAM)


def check() -> None:
    """Run all checks, as one of the ranks."""
    process = Process.from_environment()
    device = torch.device("cuda", process.local_rank)
    start_process_group(device, 120.0)
    mesh = Mesh(parse_plan(f"tp{process.world}", {}).for_world(process.world).for_inference(), device)
    exchange = make_exchange(mesh, mesh.tp_group)
    assert exchange is not None
    with torch.no_grad():
        for shape, dtype in (
            ("345m", torch.bfloat16),
            ("124m", torch.float16),
            ("wide", torch.bfloat16),
            ("llama2", torch.bfloat16),
            ("llama32_1b", torch.bfloat16),
        ):
            Case(shape, dtype, exchange, mesh).check_rows()
        Case("345m", torch.bfloat16, exchange, mesh).check_replays()
    end_process_group()


def sum_by_nccl(parts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    total = functools.reduce(torch.add, parts[1:], parts[0].clone())[None]
    dist.all_reduce(total, group=group)
    return total


def share_of(block: BlockWeights, rank: int, ranks: int) -> BlockWeights:
    """A rank's part of a block."""

    def part(tensor: Tensor | None, dim: int = 0) -> Any:
        return None if tensor is None else tensor.chunk(ranks, dim)[rank].contiguous()

    return block._replace(
        qkv=part(block.qkv), qkv_bias=part(block.qkv_bias), proj=part(block.proj, 1), fc=part(block.fc),
        fc_bias=part(block.fc_bias), out=part(block.out, 1),
    )  # fmt: skip


class Case:
    """This rank's part of two blocks, and sequences at several positions."""

    def __init__(self, shape: str, dtype: torch.dtype, exchange: Exchange, mesh: Mesh):
        torch.manual_seed(0)  # the same numbers on every rank
        self.exchange, self.group, self.mesh = exchange, mesh.tp_group, mesh
        hidden, _, kv_heads, dim, _ = SHAPES[shape]
        self.blocks = [share_of(weights(shape, dtype), exchange.rank, exchange.ranks) for _ in range(2)]
        self.x = random(16, hidden, dtype=dtype)
        kept = [random(17, kv_heads, LENGTH, dim, scale=0.5, dtype=dtype) for _ in range(4)]
        kept = [tensor.chunk(exchange.ranks, 1)[exchange.rank].contiguous() for tensor in kept]
        self.keys, self.values = kept[:2], kept[2:]
        self.slots = torch.randperm(16, device=mesh.device)
        self.positions = torch.randint(LENGTH, (16,), device=mesh.device)

    def nccl(self, parts: Tensor) -> Tensor:
        return sum_by_nccl(parts, self.group)

    def exchanged(self, parts: Tensor) -> Tensor:
        total = self.exchange.sum(parts)
        assert total is not None
        return total

    def run(self, x: Tensor, exchange: bool) -> Tensor:
        rows, keys, values = len(x), self.keys, self.values
        ways = (self.exchanged, self.exchange) if exchange else (self.nccl, None)
        return run_blocks(x, self.blocks, keys, values, self.slots[:rows], self.positions[:rows], *ways).whole()

    def check_rows(self) -> None:
        """Few rows by the kernels that exchange within products, and more, have the bits of sums by NCCL."""
        for rows in (1, 2, 3, 4, 5, 16):
            for turn in range(5):
                expected, kept = self.run(self.x[:rows], exchange=False), [t.clone() for t in self.keys + self.values]
                delay(self.mesh, rows + turn)
                found = self.run(self.x[:rows], exchange=True)
                assert torch.equal(found, expected), (rows, (found - expected).abs().max())
                assert all(torch.equal(*pair) for pair in zip(self.keys + self.values, kept, strict=True)), rows
                assert not found.isnan().any()

    def check_replays(self) -> None:
        """A graph of several steps, each fed with the result of the one before, with delays on either rank."""
        ends = []
        for exchange in (False, True):
            x = self.x[:2].clone()

            def step(x: Tensor = x, exchange: bool = exchange) -> None:
                for _ in range(3):
                    x.copy_(torch.nn.functional.layer_norm(self.run(x, exchange) + x, x.shape[-1:]))

            step()
            x.copy_(self.x[:2])
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
            seen = []
            for turn in range(REPLAYS):
                if exchange:
                    delay(self.mesh, turn)
                graph.replay()
                seen.append(x.clone())
            ends.append(torch.stack(seen))
            torch.cuda.synchronize()
            graph.reset()
        assert torch.equal(*ends), (ends[0] != ends[1]).flatten(1).any(1).nonzero()[:3]
        assert len(ends[0].flatten(1).unique(dim=0)) > REPLAYS // 2  # steps differ, so that old words would show

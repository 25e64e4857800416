"""Ranks on CPUs that share memory as GPUs of one host do: files that all of them map."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.config.plan_names import parse_plan
from dtgpt.models.batch import Batch
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.collectives.pushes import Meeting
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel import build, pushed_shards
from dtgpt.parallel.build import build_stages, make_engine
from dtgpt.parallel.graphs import Graphs
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.torch_private import SharedMemory

CPU = torch.device("cpu")
CONFIG = GPT2Config(num_layers=3, hidden_size=16, num_heads=2, seq_length=8, vocab_size=101)


@contextmanager
def shared_files(folder: Path) -> Iterator[list[int]]:
    """Let ranks that ask for symmetric memory share files; yields the sizes that they asked for."""
    sizes: list[int] = []

    def symmetric_memory(mesh: Mesh, group: dist.ProcessGroup, size: int, usable: bool) -> SharedMemory:
        sizes.append(size)
        paths = [folder / f"{len(sizes)}-{rank}" for rank in range(group.size())]
        paths[group.rank()].write_bytes(bytes(size))
        dist.barrier()
        maps = [torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8) for path in paths]
        return SharedMemory(maps[group.rank()], tuple(maps))

    with (
        mock.patch.object(build, "symmetric_memory", symmetric_memory),
        mock.patch.object(pushed_shards, "symmetric_memory", symmetric_memory),
        mock.patch.object(Meeting, "run", lambda self: dist.barrier()),
    ):
        yield sizes


def gradients(plan: str, micro_batches: int) -> list[Tensor]:
    """The loss and this rank's gradients of the second of two steps."""
    resolved = parse_plan(plan, {}).for_world(dist.get_world_size())
    samples = resolved.dp * micro_batches
    settings = Settings(
        model=CONFIG, plan=resolved, device=CPU, dtype=torch.bfloat16, micro_batch_size=1, global_batch_size=samples
    )
    mesh = Mesh(resolved, CPU)
    stages, shards = build_stages(settings, mesh, root_key(5))
    engine = make_engine(stages, shards, settings, Graphs(enabled=False))
    for step in range(2):
        ids = mesh.place.dp * micro_batches + torch.arange(micro_batches) + 100 * step
        windows = (ids[:, None] * 37 + torch.arange(9) * 11) % 101
        shards.drop_gradients()
        loss = engine.gradients(micro_batches, Batch(windows[:, :-1], targets=windows[:, 1:]))
        engine.mean_loss(Batch(windows[:, :-1], targets=windows[:, 1:]))  # which gathers weights, too
    return [loss.clone(), *(gradient.clone() for gradient in shards.gradients)]


def pushed_and_not(folder: Path, plan: str, micro_batches: int) -> tuple[bool, float, list[int]]:
    """(whether pushed gradients have the bits of those by gloo, the largest difference, sizes of shared memory)."""
    expected = gradients(plan, micro_batches)
    with shared_files(folder) as sizes:
        found = gradients(plan, micro_batches)
    worst = max(float((a.float() - b.float()).abs().max()) for a, b in zip(found, expected, strict=True))
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), worst, sizes

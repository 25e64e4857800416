"""Ranks on CPUs that share memory as GPUs of one host do: files that all of them map."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.batch import Batch
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel.build import build_stages, make_engine
from dtgpt.parallel.engine import Graphs
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shared_memory import arena, scatter
from dtgpt.parallel.shared_memory.barrier import Barrier

CPU = torch.device("cpu")
ROOM = 1 << 12  # so that gradients arrive in several turns
CONFIG = GPT2Config(num_layers=3, hidden_size=64, num_heads=2, seq_length=8, vocab_size=101)


@contextmanager
def shared_files(folder: Path) -> Iterator[Counter[str]]:
    """Let ranks that ask for symmetric memory share files; yields how often they asked, for how many bytes, and how
    often they met."""
    count: Counter[str] = Counter()
    groups: list[dist.ProcessGroup] = []

    def shared_memory(mesh: Mesh, group: dist.ProcessGroup, size: int, usable: bool) -> list[Tensor] | None:
        if group is mesh.pp_group:  # messages need streams of a GPU
            return None
        count["shared"] += 1
        count["bytes"] += size
        groups[:] = [group]
        names = dist.get_process_group_ranks(group)
        paths = [folder / f"{count['shared']}-{name}" for name in names]
        paths[group.rank()].write_bytes(bytes(size))
        dist.barrier(group)
        return [torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8) for path in paths]

    def wait(barrier: Barrier) -> None:
        count["met"] += 1
        dist.barrier(groups[0])

    with (
        mock.patch.object(arena, "shared_memory", shared_memory),
        mock.patch.object(scatter, "ROOM", ROOM),
        mock.patch.object(Barrier, "wait", wait),
    ):
        yield count


def settings_of(plan: str, micro_batches: int, world: int, reduce: str = "fast") -> Settings:
    resolved = parse_plan(plan, {}).for_world(world)
    samples = resolved.dp * micro_batches
    return Settings(
        model=CONFIG,
        plan=resolved,
        device=CPU,
        dtype=torch.bfloat16,
        seq_length=CONFIG.seq_length,
        micro_batch_size=1,
        global_batch_size=samples,
        reduce=reduce,
    )


def gradients(plan: str, micro_batches: int, reduce: str) -> list[Tensor]:
    """The loss and this rank's gradients of the second of two steps, after an update."""
    settings = settings_of(plan, micro_batches, dist.get_world_size(), reduce)
    resolved = settings.plan
    mesh = Mesh(resolved, CPU)
    stages, shards = build_stages(settings, mesh, root_key(5))
    adamw = OptimizerConfig(lr=0.1).make(shards)
    engine = make_engine(stages, shards, settings, Graphs())
    for step in range(2):
        ids = mesh.place.dp * micro_batches + torch.arange(micro_batches) + 100 * step
        windows = (ids[:, None] * 37 + torch.arange(9) * 11) % 101
        batch = Batch(windows[:, :-1], targets=windows[:, 1:])
        if step:
            adamw.step(shards.gradients, torch.tensor(0.1), torch.tensor(1.0))
        shards.drop_gradients()
        loss = engine.gradients(micro_batches, batch).clone()
        engine.evaluate(batch)  # which gathers weights, too
    return [loss, *(gradient.clone() for gradient in shards.gradients)]


def pushed_and_not(
    folder: Path, plan: str, micro_batches: int, reduce: str = "fast"
) -> tuple[bool, float, Counter[str]]:
    """(whether pushed gradients have the bits of those by gloo, the largest difference, as of `shared_files`)."""
    expected = gradients(plan, micro_batches, reduce)
    with shared_files(folder) as count:
        found = gradients(plan, micro_batches, reduce)
    worst = max(float((a.float() - b.float()).abs().max()) for a, b in zip(found, expected, strict=True))
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), worst, count

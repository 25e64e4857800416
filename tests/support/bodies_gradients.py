"""What ranks do in test_gradients.py: gradients of a tiny model by hand and through buckets."""

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtgpt.config.execution import Settings
from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.models.decoder import Decoder
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.random.dropout import dropout_keys
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel.gradients import Buckets
from dtgpt.parallel.narrow_sums.sums import NarrowSum
from tests.support.whole_model import build_model

CPU = torch.device("cpu")
CONFIG = GPT2Config(num_layers=2, hidden_size=16, num_heads=2, seq_length=8, vocab_size=100, dropout=0.1)


def make_model(dtype: torch.dtype) -> Decoder:
    return build_model(CONFIG, CPU, torch.float32, root_key(1)).to(dtype)


def filled(model: Decoder, group: dist.ProcessGroup | None, passes: int, hooks: bool = True) -> Buckets:
    """The buckets of a model, which sum over the group."""
    settings = Settings(
        model=CONFIG,
        plan=ResolvedPlan() if hooks else parse_plan("pp2_zbv", {}).for_world(2),
        device=CPU,
        dtype=torch.float32,
        seq_length=CONFIG.seq_length,
        micro_batch_size=1,
        global_batch_size=passes,
    )
    buckets = Buckets(settings)
    buckets.open([model], SimpleNamespace(group=lambda axis, own: group))
    return buckets


def losses_of(model: Decoder, micro_batches: int, rank: int = 0) -> list[Tensor]:
    """One of each micro-batch; every rank has other samples."""
    losses = []
    for index in range(micro_batches):
        ids = 2 * (rank * micro_batches + index) + torch.arange(2)
        windows = (ids[:, None] * 37 + torch.arange(9) * 11) % 100
        keys = dropout_keys(root_key(2), ids, CONFIG.num_sites)
        losses.append(model(windows[:, :-1], keys, windows[:, 1:]))
    return losses


def by_hand(model: Decoder, micro_batches: int, rank: int = 0) -> dict[nn.Parameter, list[Tensor]]:
    """Gradients of each micro-batch as backward makes them, without any hook."""
    parameters = list(model.parameters())
    each = [torch.autograd.grad(loss, parameters) for loss in losses_of(model, micro_batches, rank)]
    return {p: list(gradients) for p, gradients in zip(parameters, zip(*each, strict=True), strict=True)}


def summed(gradients: list[Tensor]) -> Tensor:
    """In fp32, one after the other."""
    total = gradients[0].float()
    for gradient in gradients[1:]:
        total = total + gradient
    return total


def over_replicas(dtype: torch.dtype, micro_batches: int, hooks: bool) -> tuple[list[bool], list[int], int]:
    """(whether each sum is that over all ranks, sizes sent during backward, number of messages in the end)."""
    rank, world, model = dist.get_rank(), dist.get_world_size(), make_model(dtype)
    parts = [by_hand(model, micro_batches, r) for r in range(world)]
    buckets, sizes = filled(model, dist.group.WORLD, micro_batches, hooks), []
    name = "all_reduce" if dtype == torch.float32 else "all_to_all_single"
    real = getattr(dist, name)

    def counted(tensor: Tensor, *args, **options):
        sizes.append(tensor.numel())
        return real(tensor, *args, **options)

    with mock.patch.object(dist, name, counted):
        buckets.begin()
        for index, loss in enumerate(losses_of(model, micro_batches, rank)):
            assert index == 0 or not sizes  # not before the last micro-batch
            loss.backward()
        during = list(sizes)
        totals = buckets.totals(list(model.parameters()))
    local = summed if hooks else in_own_type  # without hooks the modules sum the micro-batches themselves
    expected = {p: sum(local(part[p]).to(dtype).float() for part in parts).to(dtype) for p in model.parameters()}
    same = [torch.allclose(total, expected[p], rtol=1e-6, atol=0) for p, total in zip(expected, totals, strict=True)]
    return same, during, len(sizes)


def in_own_type(gradients: list[Tensor]) -> Tensor:
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total.float()


def error_of_sum() -> float:
    """The largest relative error of a sum of bf16 numbers over the ranks, one of which every rank knows."""
    generator = torch.Generator().manual_seed(3)
    parts = (1 + torch.rand(dist.get_world_size(), 4096, generator=generator)).bfloat16()
    flat = parts[dist.get_rank()].clone()
    total = NarrowSum(flat, dist.group.WORLD)
    total.begin()
    total.wait()
    exact = parts.double().sum(0)
    return ((flat.double() - exact).abs() / exact).max().item()

"""What ranks do in test_gradients.py: gradients of a tiny model by hand and through buckets."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtgpt.model import GPT, GPTConfig, build_model
from dtgpt.ops.dropout import dropout_keys
from dtgpt.ops.random import root_key
from dtgpt.parallel.gradients import Buckets

CPU = torch.device("cpu")
CONFIG = GPTConfig(num_layers=2, hidden_size=16, num_heads=2, seq_length=8, vocab_size=100, dropout=0.1)


def make_model(dtype: torch.dtype) -> GPT:
    return build_model(CONFIG, CPU, torch.float32, root_key(1)).to(dtype)


def losses_of(model: GPT, micro_batches: int, rank: int = 0) -> list[Tensor]:
    """One of each micro-batch; every rank has other samples."""
    losses = []
    for index in range(micro_batches):
        ids = 2 * (rank * micro_batches + index) + torch.arange(2)
        windows = (ids[:, None] * 37 + torch.arange(9) * 11) % 100
        keys = dropout_keys(root_key(2), ids, CONFIG.num_sites)
        losses.append(model(windows[:, :-1], keys, windows[:, 1:]))
    return losses


def by_hand(model: GPT, micro_batches: int, rank: int = 0) -> dict[nn.Parameter, list[Tensor]]:
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


def over_replicas(micro_batches: int, hooks: bool) -> tuple[list[bool], list[int], int]:
    """(whether each total is the sum over all ranks, sizes summed during backward, number of sums in the end)."""
    rank, world, model = dist.get_rank(), dist.get_world_size(), make_model(torch.bfloat16)
    parts = [by_hand(model, micro_batches, r) for r in range(world)]
    buckets, sizes, real = Buckets([model], dist.group.WORLD, hooks), [], dist.all_reduce

    def counted(tensor: Tensor, *args, **options):
        sizes.append(tensor.numel())
        return real(tensor, *args, **options)

    with mock.patch.object(dist, "all_reduce", counted):
        buckets.begin(micro_batches)
        for index, loss in enumerate(losses_of(model, micro_batches, rank)):
            assert index == 0 or not sizes  # not before the last micro-batch
            loss.backward()
        during = list(sizes)
        buckets.finish()
    expected = {p: sum(summed(part[p]) for part in parts) for p in model.parameters()}
    if not hooks:  # the modules summed the micro-batches, in their own type
        expected = {p: sum(in_own_type(part[p]) for part in parts) for p in model.parameters()}
    same = [torch.allclose(total, expected[p], rtol=1e-5, atol=1e-7) for p, total in buckets.totals().items()]
    return same, during, len(sizes)


def in_own_type(gradients: list[Tensor]) -> Tensor:
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total.float()

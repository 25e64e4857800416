"""Linear maps and training in fp8: sites to compute with, and functions for the ranks of a plan, importable by name."""

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtgpt.compare.record import Record, record
from dtgpt.config.recipe import Recipe
from dtgpt.ops.fp8.sites import Calibration, Site, Sites
from dtgpt.ops.linear import linear
from dtgpt.ops.local_tensors import on_local_tensors
from dtgpt.optim.fp8.scales import Fp8Scales
from dtgpt.train.setup import open_trainer
from dtgpt.train.trainer import Trainer


class Inputs(NamedTuple):
    """Of a linear map, and the gradient of its output."""

    x: Tensor  # [2, 16, 32]
    weight: Tensor  # [48, 32]
    bias: Tensor | None
    dy: Tensor


def inputs(has_bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int, std: float) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    x, weight, bias = draw(2, 16, 32, std=1), draw(48, 32, std=0.02), draw(48, std=1)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    return Inputs(leaves[0], leaves[1], leaves[2] if has_bias else None, draw(2, 16, 48, std=1e-3))


def sites(*scales: float) -> Sites:
    """Return sites with these scales, by default 1, which are not known yet."""
    made = [Site(torch.tensor(s), torch.tensor(1 / s), torch.tensor(0.0)) for s in scales or (1.0, 1.0, 1.0)]
    return Sites(made[0], made[1], made[2], Calibration())


def known_sites() -> Sites:
    """Return sites with scales that fit `inputs`."""
    made = sites(2.0**4, 2.0**10, 2.0**14)
    made.calibration.known = True
    return made


def cells(of: Sites) -> tuple[Site, Site, Site]:
    return of.input, of.weight, of.gradient


def linear_on_local_tensors(cut: str) -> tuple[list[Any], list[Any]]:
    """Return the output and the gradients of x, weight and bias by `on_local_tensors`, whole, and those that plain
    tensors have. cut: columns, rows or whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    x, weight, bias, dy = inputs(dtype=torch.float32)
    assert bias is not None
    placement = {"columns": Shard(0), "rows": Shard(1), "whole": Replicate()}[cut]
    part = distribute_tensor(weight.detach(), mesh, [placement]).requires_grad_()
    beside = distribute_tensor(bias.detach(), mesh, [Shard(0) if cut == "columns" else Replicate()]).requires_grad_()
    given = distribute_tensor(x.detach(), mesh, [Shard(2) if cut == "rows" else Replicate()]).requires_grad_()
    y = on_local_tensors(linear, given, part, beside)
    assert isinstance(y, DTensor)
    whole = y.redistribute(placements=[Replicate()])
    (whole * distribute_tensor(dy, mesh, [Replicate()])).sum().backward()
    found = [whole, *(tensor.grad for tensor in (given, part, beside))]
    right = linear(x, weight, bias)
    expected = [right, *torch.autograd.grad(right, (x, weight, bias), dy)]
    return [t.full_tensor().detach().tolist() for t in found], [t.tolist() for t in expected]  # type: ignore[union-attr]


class Found(NamedTuple):
    """What a rank has of a run in fp8."""

    record: Record | None  # on rank 0
    history: list[str]  # of the scales, as checkpoints have it
    left: float  # largest amax after the last step


def scales_of(trainer: Trainer) -> Fp8Scales:
    (found,) = (state for state in trainer.optimizer.states if isinstance(state, Fp8Scales))
    return found


def record_with_history(recipe: Recipe, steps: int) -> Found:
    """Return what `dtgpt compare` records, with the history of the scales."""
    with open_trainer(recipe) as trainer:
        made = record(trainer, steps)
        scales = scales_of(trainer)
        return Found(made, scales.state(), scales.amax.max().item())


def record_with_fp32_activations(recipe: Recipe, steps: int) -> Found:
    """Return the same of a run whose products are of 8 bits and all else of fp32: two runs then differ by the values
    that rounding moves from one 8-bit number to the next, of which there are few."""
    with mock.patch("dtgpt.config.recipe.choose_dtype", lambda precision, device: torch.float32):
        return record_with_history(recipe, steps)


def history_after_resume(recipe: Recipe, run: Path) -> tuple[list[str], bool]:
    """Return the history of the scales that a run goes on with, and whether its first step uses them."""
    with open_trainer(recipe, run) as trainer:
        scales = scales_of(trainer)
        return scales.state(), scales.calibration.known

"""What the ranks of tests of the cross-entropy and of the head do: functions importable by name."""

from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dtgpt.ops.loss.head
from dtgpt.ops.loss.cross_entropy import cross_entropy, local_terms, losses_of, plain_gradient
from dtgpt.ops.loss.head import head_loss
from dtgpt.parallel.layout import chunk


class Case(NamedTuple):
    """Logits `[B, T, V]` of `vocab_size` columns and padding, and targets `[B, T]`."""

    logits: Tensor
    targets: Tensor
    vocab_size: int


class Result(NamedTuple):
    """The loss, and the gradient of 3 x loss in this rank's columns."""

    loss: Tensor
    gradient: Tensor
    columns: range


def losses(cases: list[Case]) -> list[Result]:
    """Of each case, with the columns cut over the ranks as a plan cuts them."""
    return [loss_of(case) for case in cases]


def loss_of(case: Case) -> Result:
    columns, group = my_part(case.logits.shape[-1])
    mine = case.logits[..., columns.start : columns.stop].clone().requires_grad_()
    loss = cross_entropy(mine, case.targets, case.vocab_size, columns.start, group)
    (3 * loss).backward()
    return Result(loss.detach(), mine.grad, columns)


def my_part(width: int) -> tuple[range, dist.ProcessGroup | None]:
    if not dist.is_initialized():
        return range(width), None
    return chunk(range(width), dist.get_world_size(), dist.get_rank()), dist.group.WORLD


class HeadCase(NamedTuple):
    """x `[B, T, H]`, weight `[V, H]` and targets `[B, T]`; gradients are to be multiplied by the scale."""

    x: Tensor
    weight: Tensor
    targets: Tensor
    vocab_size: int
    scale: float = 1.0


class HeadResult(NamedTuple):
    """The loss, the loss where no gradient is wanted, and of 3 x loss this rank's summand of dx and its rows of dw."""

    loss: Tensor
    alone: Tensor
    dx: Tensor
    dw: Tensor


def head_results(cases: list[HeadCase], logits_bytes: int, as_dtensor: bool = False) -> list[HeadResult]:
    """Of each case, with the weight cut over the ranks."""
    before, dtgpt.ops.loss.head.LOGITS_BYTES = dtgpt.ops.loss.head.LOGITS_BYTES, logits_bytes
    try:
        return [head_result(case, as_dtensor) for case in cases]
    finally:
        dtgpt.ops.loss.head.LOGITS_BYTES = before


def head_result(case: HeadCase, as_dtensor: bool = False) -> HeadResult:
    x = case.x.clone().requires_grad_()
    if as_dtensor:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        w, place = distribute_tensor(case.weight, mesh, [Shard(0)]).requires_grad_(), {}
    else:
        rows, group = my_part(len(case.weight))
        w, place = case.weight[rows.start : rows.stop].clone().requires_grad_(), {"start": rows.start, "group": group}
    with torch.no_grad():
        alone = head_loss(x, w, case.targets, case.vocab_size, **place)
    scale = None if case.scale == 1 else torch.tensor(case.scale, device=x.device)
    loss = head_loss(x, w, case.targets, case.vocab_size, scale=scale, **place)
    (3 * loss).backward()
    return HeadResult(loss.detach(), alone, x.grad, w.grad.to_local() if as_dtensor else w.grad)


def refusal_of_other_cuts() -> str:
    """What is said of a weight that is cut along H."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.ones(8, 4), mesh, [Shard(1)])
    try:
        head_loss(torch.ones(1, 2, 4), weight, torch.zeros(1, 2, dtype=torch.int64), 8)
    except ValueError as error:
        return str(error)
    return ""


class Rows(NamedTuple):
    """`count` rows of `width` logits from column `start` on, `real` of them no padding."""

    count: int
    width: int
    start: int
    real: int


ROWS = [Rows(5, 384, 0, 257), Rows(3, 384, 100, 384), Rows(2, 390, 7, 256), Rows(1, 40, 0, 3), Rows(3, 256, 512, 0)]


def check_kernels(device: str, dtype: torch.dtype, cases: list[Rows]) -> None:
    """The Triton kernels against the plain passes. What lies in the padding is no number."""
    from dtgpt.ops.kernels.cross_entropy_kernels import launch_gradient, launch_loss, launch_terms

    generator = torch.Generator().manual_seed(1)
    rtol = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for (count, width, start, real), cap, each in product(cases, (0.0, 4.0), (False, True)):
        scale = (50 * torch.rand(count, generator=generator) if each else torch.tensor(50.0)).to(device)
        logits = (3 * torch.randn(count, width, generator=generator)).to(dtype)
        logits[:, real:] = torch.nan
        logits = logits.to(device)
        wanted = torch.randint(start + width + 9, (count,), generator=generator).to(device)  # some are elsewhere
        whole = torch.tensor([[5.0], [900.0], [0.0]], device=device) + torch.zeros(3, count, device=device)
        if real > 0:
            terms, plain = launch_terms(logits, wanted, start, real, cap), local_terms(logits, wanted, start, real, cap)
            torch.testing.assert_close(terms, plain, rtol=5e-6, atol=0)
            assert cap or (torch.equal(terms[0], plain[0]) and torch.equal(terms[2], plain[2]))
        found = logits.clone()
        launch_gradient(found, wanted, whole[0], whole[1], scale, start, real, cap)
        expected = plain_gradient(logits, wanted, whole[0], whole[1], scale, start, real, cap)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-7)
        assert not found[:, real:].any()
        if start == 0:
            wanted = wanted.clamp(max=real - 1)
            terms, found = local_terms(logits, wanted, 0, real, cap), logits.clone()
            losses = launch_loss(found, wanted, scale, real, cap)
            torch.testing.assert_close(losses, losses_of(*terms), rtol=5e-6, atol=1e-6)
            expected = plain_gradient(logits, wanted, terms[0], terms[1], scale, 0, real, cap)
            torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-7)
            assert not found[:, real:].any()


def interpret_kernels() -> None:
    """`check_kernels` on a CPU, under Triton's interpreter, in blocks so small that rows have several."""
    import dtgpt.ops.kernels.cross_entropy_kernels as kernels

    for dtype in (torch.float32, torch.bfloat16):
        kernels.BLOCK_BYTES = 128 * dtype.itemsize
        check_kernels("cpu", dtype, ROWS)

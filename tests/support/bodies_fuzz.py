"""Faults of the ranks of a random case."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from dtgpt.compare.fuzz.case import Case, Run, Setting
from dtgpt.compare.fuzz.measure import Seen, measure
from dtgpt.models.binding import bind
from dtgpt.ops.experts.products import grouped_product, grouped_reference
from dtgpt.ops.experts.routing import _Logits, choose
from dtgpt.parallel.tensor import DropoutShard


@contextmanager
def mask_offset() -> Iterator[None]:
    """The shard of each rank draws its mask one element too late."""
    apply = DropoutShard._apply

    def late(self, module, mesh):
        module = apply(self, module, mesh)
        if mesh.get_local_rank():
            bind(module, start=tuple(n + (dim == self.dim) for dim, n in enumerate(module.bound.start)))
        return module

    with mock.patch.object(DropoutShard, "_apply", late):
        yield


def with_mask_offset(setting: Setting, case: Case, run: Run) -> Seen | None:
    with mask_offset():
        return measure(setting, case, run)


def with_half_of_router_gradients(setting: Setting, case: Case, run: Run) -> Seen | None:
    def half(ctx, grad):
        dx, dweight = backward(ctx, grad)
        return dx, dweight / 2

    backward = _Logits.backward
    with mock.patch.object(_Logits, "backward", half):
        return measure(setting, case, run)


def with_swapped_experts(setting: Setting, case: Case, run: Run) -> Seen | None:
    """Tokens choose experts 0 and 1 in place of each other."""

    def swapped(*arguments) -> Tensor:
        experts = choose(*arguments)
        return torch.where(experts < 2, 1 - experts, experts)

    with mock.patch("dtgpt.models.moe.mixture.choose", swapped):
        return measure(setting, case, run)


def with_other_experts(setting: Setting, case: Case, run: Run) -> Seen | None:
    """Rows go through the matrices of the next expert."""

    def of_next(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return grouped_reference(x, weight.roll(1, 0), ends)

    with mock.patch.object(grouped_product, "definition", of_next):
        return measure(setting, case, run)


def hang(how: str, setting: Setting, case: Case, run: Run) -> Seen | None:
    """Fail on rank 1 in one of four ways, while rank 0 waits for it."""
    if os.environ["RANK"] == "1":
        if how == "wait":
            time.sleep(60)
        elif how == "raise":
            1 / 0  # noqa: B018
        elif how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        else:
            os._exit(3)
    return measure(setting, case, run)

"""Bugs put into the ranks of a random case on purpose, each as dtgpt could have it."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from dtgpt.checkpoint.load import load_training
from dtgpt.fuzz.case import Case, Run, Setting
from dtgpt.fuzz.measure import Seen, measure
from dtgpt.ops.optim.adamw import Accumulator
from dtgpt.parallel.shards import Shards
from dtgpt.parallel.tensor import DropoutShard
from dtgpt.train.trainer import gradient_share


@contextmanager
def gradient_not_summed_over_sp() -> Iterator[None]:
    with mock.patch("dtgpt.parallel.shards._sums_over_tp", lambda stage: set()):
        yield


@contextmanager
def mask_offset() -> Iterator[None]:
    """The shard of each rank draws its mask one element too late."""
    apply = DropoutShard._apply

    def late(self, module, mesh):
        module = apply(self, module, mesh)
        if mesh.get_local_rank():
            module.start = tuple(n + (dim == self.dim) for dim, n in enumerate(module.start))
        return module

    with mock.patch.object(DropoutShard, "_apply", late):
        yield


@contextmanager
def wrong_share_of_the_loss() -> Iterator[None]:
    """Replicas are left out of what a micro-batch counts."""
    with mock.patch("dtgpt.train.trainer.gradient_share", lambda count, plan: gradient_share(count, plan) * plan.dp):
        yield


@contextmanager
def tied_table_summed_twice() -> Iterator[None]:
    take = Shards.take_gradients

    def twice(self):
        take(self)
        if self.mesh.tied_group is not None:
            for i in self._tables:
                dist.all_reduce(self.gradients[i], group=self.mesh.tied_group)

    with mock.patch.object(Shards, "take_gradients", twice):
        yield


@contextmanager
def stale_buffer() -> Iterator[None]:
    """The sum of a step's gradients begins with that of the step before."""
    with mock.patch.object(Accumulator, "store", Accumulator.add):
        yield


@contextmanager
def forgotten_moment() -> Iterator[None]:
    """A resumed run begins with the mean of its gradients at zero."""

    def forget(checkpoint, shards, optimizer):
        load_training(checkpoint, shards, optimizer)
        for moment in optimizer.exp_avg:
            moment.zero_()

    with mock.patch("dtgpt.train.checkpoints.load_training", forget):
        yield


BUGS: dict[str, Callable] = {
    body.__name__.replace("_", " "): body
    for body in (
        gradient_not_summed_over_sp, mask_offset, wrong_share_of_the_loss, tied_table_summed_twice, stale_buffer,
        forgotten_moment,
    )
}  # fmt: skip


def with_bug(name: str, setting: Setting, case: Case, run: Run) -> Seen | None:
    with BUGS[name]():
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

"""What ranks do in test_dryrun.py."""

from contextlib import ExitStack

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtgpt.run.signals import StopRequest
from dtgpt.train.startup import read_on_every_node, start
from dtgpt.train.trainer import Trainer


class Messages(TorchDispatchMode):
    """Counts collectives of both kinds: those of process groups and the functional ones of DTensor."""

    kinds = ("all_gather", "reduce_scatter", "all_reduce")

    def __init__(self):
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace in ("c10d", "_c10d_functional"):
            name = op.name().replace("allgather", "all_gather").replace("allreduce", "all_reduce")
            kind = next((k for k in self.kinds if k in name), None)
            if kind:
                self.counts[kind] = self.counts.get(kind, 0) + 1
        return op(*args, **(kwargs or {}))


def messages(recipe) -> dict[str, int]:
    """How often each kind of collective runs while one rank computes the gradients of a step."""
    with ExitStack() as stack:
        recipe, mesh, process = start(recipe, stack)
        training = Trainer(recipe, mesh, read_on_every_node(recipe, mesh, process), None, StopRequest())
        training.train_step()
        with Messages() as seen:
            training.gradients()
        return seen.counts


def memory_of_weights(recipe) -> int:
    """Bytes of weights on this rank."""
    with ExitStack() as stack:
        recipe, mesh, process = start(recipe, stack)
        training = Trainer(recipe, mesh, read_on_every_node(recipe, mesh, process), None, StopRequest())
        return sum(shard.local.numel() * torch.float32.itemsize for shard in training.shards)

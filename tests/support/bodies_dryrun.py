"""What ranks do in the tests of planning."""

from functools import partial

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.library import Library

from dtgpt.config.recipe import Recipe
from dtgpt.train.setup import open_trainer
from tests.support.one_rank import BuiltRank, describe_built

KINDS = {
    "all_gather": ("_allgather_base_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    "reduce_scatter": ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"),
    "all_reduce": ("allreduce_", "allreduce_coalesced_"),
    "all_to_all": ("alltoall_base_", "alltoall_"),
}
BELOW = DispatchKeySet(DispatchKey.BackendSelect)


class Messages:
    """Counts the collectives of process groups, those below DTensor's functional ones and in operators too.

    A mode of dispatch would see each operation of a step, and take as long as the step. Only collectives pass through
    this: a kernel in front of those of CPUs, at the key that every call has.
    """

    def __enter__(self):
        self.counts: dict[str, int] = {}
        self.whole: dict[str, int] = {}  # bytes of what is gathered, summed or exchanged in one tensor, by kind
        self._kernels = Library("c10d", "IMPL")
        for kind, names in KINDS.items():
            for name in names:
                counted = partial(self._counted, kind, getattr(torch.ops.c10d, name).default)
                self._kernels.impl(name, counted, "BackendSelect", with_keyset=True)
        return self

    def __exit__(self, *raised):
        self._kernels._destroy()

    def _counted(self, kind, op, keys, *args):
        assert op.name() != "c10d::allgather_into_tensor_coalesced_", "see GroupCollectives"
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if "base" in op.name():
            whole = args[0 if kind == "all_gather" else 1]
            self.whole[kind] = self.whole.get(kind, 0) + whole.nbytes
        return op.redispatch(keys - BELOW, *args)


def messages(recipes: list[Recipe]) -> list[dict[str, int]]:
    """Of each recipe, how often each kind of collective runs while one rank computes the gradients of a step."""
    found = []
    for recipe in recipes:
        with open_trainer(recipe) as training:
            training.train_step()
            with Messages() as seen:
                training.gradients()
        found.append(seen.counts)
    return found


def whole_bytes(recipe: Recipe) -> dict[str, int]:
    """The bytes of what ranks gather, sum or exchange in one tensor while one computes the gradients of a step."""
    with open_trainer(recipe) as training, Messages() as seen:
        training.gradients()
        return seen.whole


def exchanged(recipe) -> tuple[int, int]:
    """The number and the bytes of what context parallel ranks exchange while one rank computes a step's gradients."""
    with open_trainer(recipe) as training, Messages() as seen:
        training.gradients()
        return seen.counts["all_to_all"], seen.whole["all_to_all"]


def built(recipes: list[Recipe]) -> list[BuiltRank]:
    """What this rank of a real process group holds of each recipe."""
    found = []
    for recipe in recipes:
        with open_trainer(recipe) as training:
            found.append(describe_built(training.stages, training.shards, training.optimizer.rule, training.settings))
    return found

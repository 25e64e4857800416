"""What ranks do in the tests of planning."""

from torch.utils._python_dispatch import TorchDispatchMode

from dtgpt.config.recipe import Recipe
from dtgpt.train.setup import open_trainer
from tests.support.one_rank import BuiltRank, describe_built


class Messages(TorchDispatchMode):
    """Counts collectives of both kinds: those of process groups and the functional ones of DTensor."""

    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

    def __init__(self):
        super().__init__()
        self.counts: dict[str, int] = {}
        self.exchanged = 0  # bytes, by context parallel ranks
        self.whole: dict[str, int] = {}  # bytes of what is gathered, summed or exchanged in one tensor, by kind

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.name() == "dtgpt::exchange":
            self.counts["all_to_all"] = self.counts.get("all_to_all", 0) + 1
            self.exchanged += args[0].nbytes
        if op.namespace in ("c10d", "_c10d_functional"):
            name = op.name().replace("allgather", "all_gather").replace("allreduce", "all_reduce")
            name = name.replace("alltoall", "all_to_all")
            kind = next((k for k in self.kinds if k in name), None)
            if kind:
                assert not op.name().startswith("_c10d_functional::all_gather"), "see GroupCollectives"
                self.counts[kind] = self.counts.get(kind, 0) + 1
            if kind and "base" in name:
                whole = args[1 if kind == "reduce_scatter" else 0]
                self.whole[kind] = self.whole.get(kind, 0) + whole.nbytes
        return op(*args, **(kwargs or {}))


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
        return seen.counts["all_to_all"], seen.exchanged


def built(recipes: list[Recipe]) -> list[BuiltRank]:
    """What this rank of a real process group holds of each recipe."""
    found = []
    for recipe in recipes:
        with open_trainer(recipe) as training:
            found.append(describe_built(training.stages, training.shards, training.optimizer.rule, training.settings))
    return found

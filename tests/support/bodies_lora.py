"""What ranks do in tests of adapters."""

from pathlib import Path

from torch import Tensor

from dtgpt.compare.gate import Reference
from dtgpt.compare.record import Tracing
from dtgpt.compare.trace import Key
from dtgpt.compare.whole_tensors import gather_whole
from dtgpt.config.recipe import Recipe
from dtgpt.planning.memory import memory_of
from dtgpt.train.setup import open_trainer
from tests.support.bodies_optimizer import train_part
from tests.support.runs import traced_record


def train_and_save(recipe: Recipe, run: Path, last: int) -> tuple[list[float], dict[str, Tensor | None]]:
    """Train a part of a run. Return (losses, what is trained, whole, on rank 0)."""
    return train_part(recipe, run, last)[:2]


def codes_of(recipe: Recipe) -> tuple[dict[str, Tensor | None], int, int]:
    """Return what holds the base in 4 bits, whole, on rank 0; the bytes that are planned for this rank's weights and
    the optimizer's state, and those that it has."""
    with open_trainer(recipe) as trainer:
        frozen = trainer.shards.frozen
        assert frozen is not None
        states = [trainer.optimizer.rule.state(shard.index) for shard in trainer.shards]
        held = [shard.local for shard in (*frozen, *trainer.shards)] + [t for each in states for t in each.values()]
        planned = memory_of(trainer.settings, trainer.mesh.rank)
        chosen = lambda shard: not shard.local.is_floating_point()  # noqa: E731
        codes = dict(gather_whole(frozen, lambda shard: shard.local, chosen))
        return codes, planned.weights + planned.optimizer, sum(tensor.nbytes for tensor in held)


def assert_gradients_of_float64(recipe: Recipe, folder: Path) -> None:
    """The gate's float64 has the parameters of adapters, and their gradients are those of a run."""
    file = folder / "one"
    record = traced_record(recipe, Tracing(file, folder / "shared", is_reference=True))
    exact = Reference(file, record).exact
    names = {key.name for key in exact.keys if key.kind == "parameter"}
    assert names == {name.removeprefix("first gradient/") for name in record.tensors if name.startswith("first grad")}
    for name in names:
        found, expected = record.tensors[f"first gradient/{name}"], exact[Key(0, "parameter", name)]
        assert (found - expected).norm() <= 1e-5 * expected.norm(), name

"""Traced runs of a recipe: the reference of each is made once in a file of tests."""

from pathlib import Path

import pytest

from dtgpt.compare.compare import fitting_plan
from dtgpt.compare.finding import Located
from dtgpt.compare.gate import Reference, locate
from dtgpt.compare.record import Record, Tracing
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import DataConfig, LogConfig, OptimizerConfig
from dtgpt.models.gpt2 import GPT2Config
from tests.support.ranks import pool
from tests.support.runs import change as changed
from tests.support.runs import traced_record


class Traced:
    """The reference of a recipe over some steps, and runs that are held against it."""

    def __init__(self, recipe: Recipe, folder: Path, steps: int):
        self._folder, self._steps, self._runs = folder, steps, 0
        tracing = Tracing(folder / "one", folder / "shared", is_reference=True)
        self.record = traced_record(recipe, tracing, steps=steps)
        self.reference = Reference(tracing.file, self.record)

    def run(self, recipe: Recipe, plan: str = "single", change: str = "") -> tuple[Path, Record]:
        """Return the traces and the record of a run. change: as of `traced_record`."""
        self._runs += 1
        tracing = Tracing(self._folder / f"other-{self._runs}", self._folder / "shared", is_reference=False)
        given = changed(recipe, plan=plan), tracing, change, self._steps
        if plan == "single":
            return tracing.file, traced_record(*given)
        return tracing.file, pool().run(fitting_plan(plan, [], {}).world, traced_record, *given)[0]

    def located(self, recipe: Recipe, plan: str = "single", change: str = "", limit: float = 1e-5) -> Located:
        """Return where a run parts from the reference. limit: as of `locate`."""
        file, record = self.run(recipe, plan, change)
        return locate(self.reference, record, file, limit)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Recipe:
    """A recipe whose step has two micro-batches."""
    folder = tmp_path_factory.mktemp("traced")
    (folder / "text.txt").write_text("".join(f"{i} and {i + 1} make {2 * i + 1}.\n" for i in range(400)))
    return Recipe(
        name="traced", device="cpu", steps=10, micro_batch_size=4, global_batch_size=8,
        model=GPT2Config(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=257, dropout=0.1),
        optimizer=OptimizerConfig(lr=3e-3), data=DataConfig(path=str(folder / "text.txt"), tokenizer="bytes"),
        log=LogConfig(eval_interval=5, eval_samples=8), runs=str(folder / "runs"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Return the reference of a recipe over so many steps."""
    made: dict[str, Traced] = {}

    def trace(recipe: Recipe, steps: int = 1) -> Traced:
        key = repr((recipe, steps))
        if key not in made:
            made[key] = Traced(recipe, tmp_path_factory.mktemp("reference"), steps)
        return made[key]

    return trace

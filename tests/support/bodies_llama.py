"""What ranks do in test_llama_parity.py."""

from typing import NamedTuple

from dtgpt.compare import record as recording
from dtgpt.config.recipe import Recipe
from dtgpt.planning.parameters import parameters_of
from dtgpt.train.setup import open_trainer
from dtgpt.train.texts.generate import generate_text


class Seen(NamedTuple):
    """What a plan did."""

    record: recording.Record | None  # on rank 0
    held_out: tuple[float, float | None] | None
    sample: str | None
    held: list[int]  # elements of each shard of this rank
    planned: list[int]  # as `dtgpt plan` has them


def train_and_evaluate(recipe: Recipe, steps: int) -> Seen:
    """Take the steps as `dtgpt compare` does, then evaluate and sample as a run does in between."""
    with open_trainer(recipe) as trainer:
        record = recording.record(trainer, steps)
        held = sorted(shard.local.numel() for shard in trainer.shards)
        planned = sorted(p.local for p in parameters_of(recipe.model, trainer.settings.plan, trainer.mesh.rank))
        return Seen(record, trainer.held_out_loss(), generate_text(trainer), held, planned)

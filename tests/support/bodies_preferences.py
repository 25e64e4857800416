"""What ranks do in tests/posttrain/test_preferences.py."""

from dataclasses import asdict
from pathlib import Path
from unittest import mock

from dtgpt.checkpoint.save import Saver
from dtgpt.config.recipe import Recipe
from dtgpt.posttrain.dpo import objective
from dtgpt.posttrain.dpo.loss import FIGURES
from dtgpt.posttrain.dpo.pairs import PairDataset
from dtgpt.posttrain.dpo.reference import save_reference
from dtgpt.train import loop
from dtgpt.train.checkpoints import state_of
from dtgpt.train.setup import open_trainer
from dtgpt.util.errors import UserError
from tests.support.disks import files_of_at_most


def train_pairs(recipe: Recipe, run: Path, last: int) -> tuple[list[float], list[dict[str, float]]]:
    """Go on from the newest checkpoint of `run`, if there is one, to step `last`, and save. Return losses, and figures
    of each step, with their sums over pairs and the norm of the gradient, and of held-out pairs at the end."""
    checkpoints = run / "checkpoints"
    with open_trainer(recipe, run if checkpoints.exists() else None) as trainer:
        losses, figures = [], []
        for _ in range(last - trainer.step):
            result = trainer.train_step()
            losses.append(trainer.mean_loss(result))
            interval, again = (trainer.objective.open_interval(trainer.mesh) for _ in range(2))
            interval.add(result.loss)
            again.restore(state := interval.state())
            assert again.state() == state
            sums = dict(zip(FIGURES, state["preferences"], strict=True))
            figures.append(trainer.objective.figures(interval) | sums | {"grad_norm": result.norm.item()})
        figures.append(trainer.held_out().figures)
        trainer.mesh.on_rank_0(lambda: checkpoints.mkdir(parents=True, exist_ok=True))
        trainer.mesh.on_rank_0(lambda: trainer.objective.save(run))
        with Saver(checkpoints, trainer.shards, trainer.optimizer.rule) as saver:
            saver.save(trainer.step, state_of(trainer, asdict(recipe)), must=True)
        return losses, figures


def train_without_room_for_its_reference(recipe: Recipe) -> str:
    """What ends a run that can write 500 bytes of its reference."""

    def save(run: Path, data: PairDataset) -> None:
        with files_of_at_most(500):
            save_reference(run, data)

    with mock.patch.object(objective, "save_reference", save):
        try:
            return f"exit code {loop.train(recipe)}"
        except UserError as error:
            return str(error)

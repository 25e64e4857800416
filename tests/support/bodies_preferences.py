"""What ranks do in tests/train/test_preferences.py."""

from dataclasses import asdict
from pathlib import Path

from dtgpt.checkpoint.save import Saver
from dtgpt.config.recipe import Recipe
from dtgpt.ops.loss.preference import figures_of
from dtgpt.train.checkpoints import state_of
from dtgpt.train.preferences import held_out_figures, save_reference
from dtgpt.train.startup import open_trainer


def train_pairs(recipe: Recipe, run: Path, last: int) -> tuple[list[float], list[dict[str, float]]]:
    """Go on from the newest checkpoint of `run`, if there is one, to step `last`, and save. Return losses, and figures
    of each step, with the norm of its gradient, and of held-out pairs at the end."""
    checkpoints = run / "checkpoints"
    with open_trainer(recipe, run if checkpoints.exists() else None) as trainer:
        losses, figures = [], []
        for _ in range(last - trainer.step):
            result = trainer.train_step()
            losses.append(trainer.mean_loss(result))
            of_pairs = figures_of(trainer.mesh.sum(*trainer.objective.totals).tolist())
            figures.append(of_pairs | {"grad_norm": result.norm.item()})
        figures.append(held_out_figures(trainer, "valid"))
        trainer.mesh.on_rank_0(lambda: checkpoints.mkdir(parents=True, exist_ok=True))
        trainer.mesh.on_rank_0(lambda: save_reference(run, trainer.dataset))
        with Saver(checkpoints, trainer.shards, trainer.optimizer.rule) as saver:
            saver.save(trainer.step, state_of(trainer, asdict(recipe)), must=True)
        return losses, figures

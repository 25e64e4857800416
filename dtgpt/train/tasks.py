"""Tasks with known answers that a run measures between its steps, with the stages that it trains."""

from collections.abc import Callable

import torch

from dtgpt.config.sections import LogConfig
from dtgpt.evaluation.catalog import Asked, prepare, tasks_and_files
from dtgpt.evaluation.scoring import Scorer
from dtgpt.evaluation.tasks import Prepared, Result, TaskOptions
from dtgpt.inference.finite import NotFinite
from dtgpt.parallel.context import whole_samples
from dtgpt.train.trainer import Trainer
from dtgpt.util.console import say
from dtgpt.util.errors import UserError


def tasks_of(log: LogConfig) -> list[Asked]:
    """Return the tasks that the log options ask for. Raise UserError where they are not tasks with files."""
    if log.eval_tasks is None:
        return []
    try:
        asked = tasks_and_files(log.eval_tasks, TaskOptions(limit=log.eval_tasks_limit))
    except UserError as error:
        raise UserError(f"log.eval_tasks: {error}") from None
    names = [one.task.name for one in asked]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"log.eval_tasks has {min(twice)} twice; give one file for each task")
    return asked


class TaskEvaluation:
    """The tasks of a run. Rank 0 alone reads their files."""

    def __init__(self, trainer: Trainer):
        """Read the files. Raise UserError, on every rank, where that cannot be done."""
        self.names, self._trainer = [asked.task.name for asked in tasks_of(trainer.log)], trainer
        self._prepared: list[Prepared] = []
        if self.names:
            trainer.mesh.on_rank_0(self._read)

    def _read(self) -> None:
        tokenizer, positions = self._trainer.dataset.tokenizer, self._trainer.settings.model.seq_length
        self._prepared = [prepare(asked, tokenizer, positions)[1] for asked in tasks_of(self._trainer.log)]

    def measure(self, interrupted: Callable[[], bool]) -> list[Result] | None:
        """Return the results of the tasks on rank 0, nothing on the other ranks; None, on every rank, where
        `interrupted`, which all ranks ask together, became true in between."""
        trainer, settings, results = self._trainer, self._trainer.settings, []
        # The memory of a micro-batch in training is enough for as many tokens without gradients.
        tokens = settings.micro_batch_size * settings.seq_length
        scorer = Scorer(trainer.stages, trainer.mesh, settings.model, settings.dtype, tokens)
        for number in range(len(self.names)):
            prepared = self._prepared[number] if self._prepared else None
            # Batches of other shapes would be compiled anew.
            try:
                with torch.compiler.set_stance("force_eager"), trainer.as_loaded(), whole_samples(trainer.stages):
                    scores = scorer.score(prepared and prepared.samples, interrupted=interrupted)
            except NotFinite as error:  # the loss decides whether the run goes on
                say(f"{self.names[number]} at step {trainer.step} has no result: {error}", warning=True)
                continue
            if scores is None:
                return None
            if prepared:
                results.append(prepared.measure(scores))
        return results

"""Tasks with known answers that a run measures between its steps, with the stages that it trains."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dtgpt.evaluation import LogFields
from dtgpt.evaluation.catalog import Asked, prepare, tasks_and_files
from dtgpt.evaluation.scoring import Scorer
from dtgpt.evaluation.tasks import Prepared, Result, TaskOptions
from dtgpt.inference.request import NotFinite
from dtgpt.parallel.context_parallel.slices import whole_samples
from dtgpt.train.observer import AfterStep, Observer, Turn, is_due
from dtgpt.train.trainer import Trainer
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.shared.as_loaded import as_loaded

if TYPE_CHECKING:
    from dtgpt.train.unfinished.left import Past


def tasks_of(log: LogFields) -> list[Asked]:
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


class TaskEvaluation(Observer):
    """The tasks of a run. Rank 0 alone reads their files."""

    turn, title = Turn.MEASURE, "tasks"

    def __init__(self, log: Any, steps: int):
        """Raise UserError where the log options do not ask for tasks with files."""
        self._asked, self._steps = tasks_of(log), steps
        self._interval = log.eval_interval if log.eval_tasks_interval is None else log.eval_tasks_interval
        self._prepared: list[Prepared] = []

    def prepare(self, trainer: Trainer) -> None:
        """Read the files. Raise UserError, on every rank, where that cannot be done."""
        tokenizer, positions = trainer.dataset.tokenizer, trainer.settings.model.seq_length

        def read() -> None:
            self._prepared = [prepare(asked, tokenizer, positions)[1] for asked in self._asked]

        trainer.mesh.on_rank_0(read)

    def due(self, step: int) -> bool:
        return step == self._steps or is_due(step, self._interval)

    def act(self, after: AfterStep) -> None:
        results = self.measure(after.trainer, after.interrupted)
        if results is not None:
            # The main figure of each task is the first.
            own = {result.task: result.figures for result in results}
            figures = {f"{task}/{name}": value for task, named in own.items() for name, value in named.items()}
            lines = (
                f"{task}: {'  '.join(f'{name} {value:.4f}' for name, value in named.items())}"
                for task, named in own.items()
            )
            after.report.figures(after.trainer.step, figures, *lines)

    def left(self, past: "Past") -> bool:
        measured = {name.partition("/")[0] for record in past.records for name in record if "/" in name}
        return not measured.issuperset(asked.task.name for asked in self._asked)

    def measure(self, trainer: Trainer, interrupted: Callable[[], bool]) -> list[Result] | None:
        """Return the results of the tasks on rank 0, nothing on the other ranks; None, on every rank, where
        `interrupted`, which all ranks ask together, became true in between."""
        settings, results = trainer.settings, []
        # The memory of a micro-batch in training is enough for as many tokens without gradients.
        tokens = settings.micro_batch_size * settings.seq_length
        scorer = Scorer(trainer.stages, trainer.mesh, settings.model, settings.dtype, tokens)
        for number, asked in enumerate(self._asked):
            prepared = self._prepared[number] if self._prepared else None
            # Batches of other shapes would be compiled anew.
            try:
                with torch.compiler.set_stance("force_eager"), as_loaded(trainer), whole_samples(trainer.stages):
                    scores = scorer.score(prepared and prepared.samples, interrupted=interrupted)
            except NotFinite as error:  # the loss decides whether the run goes on
                say(f"{asked.task.name} at step {trainer.step} has no result: {error}", warning=True)
                continue
            if scores is None:
                return None
            if prepared:
                results.append(prepared.measure(scores))
        return results

"""Whether a run measures tasks. Every run asks; the tasks are imported only where it does."""

from dtgpt.config.sections import LogConfig
from dtgpt.train.observer import Observer


def observe_tasks(log: LogConfig, steps: int) -> Observer | None:
    if log.eval_tasks is None:
        return None
    from dtgpt.evaluation.in_training import TaskEvaluation

    return TaskEvaluation(log, steps)

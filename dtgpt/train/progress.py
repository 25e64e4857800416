"""The progress line of a run, and its record in metrics.jsonl."""

from dtgpt.config.sections import LogConfig
from dtgpt.train.interval_loss import IntervalLoss
from dtgpt.train.observer import AfterStep, Observer, Turn, is_due
from dtgpt.util.console import say
from dtgpt.util.hardware import peak_memory


class Progress(Observer):
    """Say how far the run is and how it does. The first step of a start has a line of its own: one sees that it runs,
    and how large the loss is. It is recorded where it is the first of the run, so that a resume records no more."""

    turn = Turn.REPORT

    def __init__(self, log: LogConfig, steps: int, sample_length: int, interval: IntervalLoss):
        self._every, self._steps, self._sample_length = log.interval, steps, sample_length
        self._interval = interval
        self._began = False
        self._cautioned = False  # once in a start

    def due(self, step: int) -> bool:
        return self._is_recorded(step) or not self._began

    def _is_recorded(self, step: int) -> bool:
        return step == 1 or step == self._steps or is_due(step, self._every)

    def act(self, after: AfterStep) -> None:
        trainer, step, self._began = after.trainer, after.trainer.step, True
        recorded = self._is_recorded(step)
        metrics = {
            **({} if after.mean_loss is None else {"loss": after.mean_loss}),
            **({} if after.loss is None else {"step_loss": after.loss}),
            "grad_norm": after.grad_norm,
            "lr": trainer.optimizer.lr.item(),
            "tokens": trainer.samples_before(step) * self._sample_length,
            "memory_gib": trainer.mesh.max(peak_memory(trainer.mesh.device)),
            "batch_size": trainer.sizes.at(step - 1),
            **trainer.objective.figures(self._interval.totals()),
            **trainer.optimizer.metrics(),
            **trainer.times(),
        }
        after.report.step(step, metrics, recorded)
        if not self._cautioned and (caution := trainer.objective.caution(metrics)):
            say(caution, warning=True)
            self._cautioned = True
        if recorded and (texts := trainer.objective.examples()):
            after.report.examples(step, texts)
        # Before a checkpoint of this step, which keeps the interval, and after all that reads it.
        if is_due(step, self._every):
            self._interval.restart()

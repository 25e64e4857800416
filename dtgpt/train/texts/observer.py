"""When a run generates texts, and where it keeps them."""

from typing import TYPE_CHECKING

from dtgpt.config.sections import LogConfig
from dtgpt.run.report import text_path
from dtgpt.train.observer import AfterStep, Observer, Turn, is_due
from dtgpt.train.trainer import Trainer
from dtgpt.util.console import say

if TYPE_CHECKING:
    from dtgpt.train.unfinished.left import Past

FOLDER = "samples"  # of a run


class Texts(Observer):
    """Generate texts after the last step, and at an interval before, and keep them in the folder `samples`."""

    turn, title = Turn.SAMPLE, "sample"

    def __init__(self, log: LogConfig, steps: int):
        self._interval, self._steps = log.sample_interval, steps

    def prepare(self, trainer: Trainer) -> None:
        trainer.dataset.tokenizer.encode(trainer.log.prompt)  # which raises UserError where the tokenizer cannot

    def due(self, step: int) -> bool:
        return step == self._steps or is_due(step, self._interval)

    def act(self, after: AfterStep) -> None:
        from dtgpt.train.texts.generate import generate_text  # a start does not import generation

        step = after.trainer.step
        if (text := generate_text(after.trainer, after.must_end)) is not None:
            say(f"---- sample at step {step}\n{text}\n----")
            after.report.text(step, FOLDER, text)

    def left(self, past: "Past") -> bool:
        return past.dataset.tokenizer.spells and not text_path(past.run, FOLDER, past.step).is_file()

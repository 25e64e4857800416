"""What writes receipts, between the steps of a run that has them on."""

from typing import TYPE_CHECKING, cast

from dtgpt.config.sections import LogConfig
from dtgpt.run.records import Begun, Sink
from dtgpt.train.observer import AfterStep, Observer, Turn, is_due

if TYPE_CHECKING:
    from dtgpt.receipts.book import Book
    from dtgpt.receipts.state import Receipts
    from dtgpt.train.trainer import Trainer

MOST = 256  # steps between two looks at the device, of which a rank keeps more


def observe(log: LogConfig, steps: int) -> Observer:
    """Return the observer of a run, which does nothing without receipts: the recipe's section is seen by its trainer
    alone."""
    return ReceiptObserver(log.interval, steps)


class ReceiptObserver(Observer):
    """Write the lines of the steps since the last time, where the progress line waits for the device anyway."""

    turn = Turn.MEASURE  # after a checkpoint, whose line they follow

    def __init__(self, interval: int, steps: int):
        self._interval, self._steps = interval, steps
        self.state: Receipts | None = None
        self.book: Book | None = None  # on rank 0

    def prepare(self, trainer: "Trainer") -> None:
        found = [state for state in trainer.optimizer.states if state.name == "receipts"]
        if found:
            state = cast("Receipts", found[0])
            state.bind(trainer)
            self.state, self._trainer = state, trainer

    def due(self, step: int) -> bool:
        if self.state is None:
            return False
        return step == self._steps or is_due(step, self._interval) or is_due(step, MOST)

    def act(self, after: AfterStep) -> None:
        assert self.state is not None
        self.state.pending += self.state.collect()
        self._write()

    def _write(self) -> None:
        """Write what is collected. Other ranks than 0 only forget it."""
        assert self.state is not None
        if self.book is None or self.book.write(self.state.pending):
            self.state.pending = []

    def sink(self, begun: Begun) -> Sink | None:
        if self.state is None:
            return None
        from dtgpt.receipts.answers import cut_answers
        from dtgpt.receipts.book import Book
        from dtgpt.receipts.start import start_of

        state, trainer = self.state, self._trainer
        start = start_of(begun.recipe, trainer, state.labels, state.bytes_of_parts)
        self.book = Book(begun.run, begun.step, start, state.pending)
        state.pending, state.sync = [], self.book.sync
        if state.answers is not None:
            cut_answers(begun.run, begun.step)
            state.answers.folder = begun.run
        return _Closing(self)


class _Closing(Sink):
    """Writes, when a run ends, the lines that were collected for its last checkpoint."""

    def __init__(self, observer: ReceiptObserver):
        self._observer = observer

    def close(self, failed: bool) -> None:
        observer = self._observer
        if observer.book is not None:
            observer._write()
            observer.book.close()
            observer.book = None

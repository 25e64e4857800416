"""A CSV of the loss of every other step, in the run folder: an observer in one file."""

from dtgpt.train.observer import AfterStep, Observer
from dtgpt.util.seams import Capability

CAPABILITY = Capability(observers=("tests.support.example_observer:LossTable",))
EVERY = 2


class LossTable(Observer):
    def __init__(self, log, steps: int):
        pass

    def due(self, step: int) -> bool:
        return step % EVERY == 0

    def act(self, after: AfterStep) -> None:
        loss = after.trainer.mesh.max(after.loss or 0.0)  # all ranks act, so that they may meet here
        if after.trainer.mesh.rank == 0:
            with (after.run / "loss.csv").open("a") as file:
                file.write(f"{after.trainer.step},{loss}\n")

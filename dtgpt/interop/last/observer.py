"""What writes a run's model as a Hugging Face folder: when the run has ended, after its last checkpoint is complete, as
`dtgpt convert` does. A run that is cut short meanwhile makes up for it when it is started again."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtgpt.checkpoint.manifest import list_checkpoints, step_of
from dtgpt.config.execution import DTYPES
from dtgpt.config.sections import LogConfig
from dtgpt.run.records import Begun, Sink
from dtgpt.train.observer import Observer, Turn
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.storage import remove_tree

if TYPE_CHECKING:
    from dtgpt.train.trainer import Trainer
    from dtgpt.train.unfinished.left import Past

FOLDER = "hf"  # in that of the run


class LastFolder(Observer):
    """Let the end of a run write the folder."""

    turn, title = Turn.END, "Hugging Face folder"

    def __init__(self, log: LogConfig, steps: int):
        self._steps = steps

    def prepare(self, trainer: "Trainer") -> None:
        self._settings = trainer.settings

    def due(self, step: int) -> bool:
        return step == self._steps

    def left(self, past: "Past") -> bool:
        """Return whether the run has no folder, or one of an earlier step."""
        folder, newest = past.run / FOLDER, list_checkpoints(past.run / "checkpoints")[-1]
        return not folder.is_dir() or folder.stat().st_mtime < newest.stat().st_mtime

    def sink(self, begun: Begun) -> Sink:
        settings = self._settings
        kind = "peft" if settings.freezes_weights else "hf"
        dtype = next(name for name, dtype in DTYPES.items() if dtype == settings.dtype)
        return _AtTheEnd(begun.run, self._steps, {"to": kind} | ({} if kind == "peft" else {"dtype": dtype}))


class _AtTheEnd(Sink):
    """Writes the folder on rank 0, where the run took its last step. options: of `dtgpt convert`."""

    def __init__(self, run: Path, steps: int, options: dict[str, Any]):
        self._run, self._steps, self._options = run, steps, options

    def close(self, failed: bool) -> None:
        checkpoints = list_checkpoints(self._run / "checkpoints")
        if failed or not checkpoints or step_of(checkpoints[-1]) != self._steps:
            return
        try:
            write_folder(checkpoints[-1], self._run / FOLDER, self._options)
        except UserError as error:  # the run is whole
            again = f"dtgpt convert {self._run} FOLDER --to {self._options['to']}"
            say(f"{error}; the run is done, write the folder later: {again}", warning=True)


def write_folder(checkpoint: Path, folder: Path, options: dict[str, Any]) -> None:
    """Write the model of a checkpoint as a folder, in place of one of an earlier step, which stays where that fails.
    Raises UserError."""
    from dtgpt.interop.convert import ConvertOptions, write

    former = folder.with_name(f".{folder.name}.former")
    if former.is_dir() and not folder.exists():  # of a process that was killed here
        former.rename(folder)
    remove_tree(former)
    if folder.exists():
        folder.rename(former)
    try:
        write(checkpoint, folder, ConvertOptions(**options))
    except BaseException:
        if former.exists() and not folder.exists():
            former.rename(folder)
        raise
    remove_tree(former)

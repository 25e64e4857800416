"""What trackers of experiments have in common: an option and a package, the values that they are sent, and the id by
which a run that goes on does so in the tracker, too."""

import os
from abc import abstractmethod
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from dtgpt.config.sections import LogConfig
from dtgpt.run.records import Begun, Sink
from dtgpt.train.observer import Observer
from dtgpt.util.errors import UserError
from dtgpt.util.storage import read_regular, write_text

LONGEST_ID = 1000  # bytes


class Tracker(Observer):
    """Send what a run records to a tracker. A class of this one says by which packages, and opens the tracker's run."""

    name: ClassVar[str]  # of its package, and of its extra
    option: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]  # that its extra installs
    online: ClassVar[bool] = False

    def __init__(self, log: LogConfig, steps: int):
        """Raise UserError where the tracker cannot serve."""
        missing = [name for name in self.packages if not is_installed(name)]
        if missing:
            raise UserError(
                f"{self.option} needs the package {missing[0]}; run pip install 'dtgpt[{self.name}]', or use "
                f"--{self.option} off"
            )
        self.check(log)

    def check(self, log: LogConfig) -> None:
        """Raise UserError where what the tracker needs of the environment is not there."""

    @abstractmethod
    def open(self, begun: Begun, known: str | None) -> "TrackedRun":
        """Return the tracker's run, that of the id `known` if there is one."""

    def sink(self, begun: Begun) -> Sink:
        id_file = begun.run / f"{self.name}-id"
        known = self._read_id(id_file) if id_file.is_file() else None  # what else is there is replaced
        try:
            opened = self.open(begun, known)
        except UserError:
            raise
        except Exception as error:  # packages of others raise what they like
            raise UserError(
                f"{self.name} cannot start ({_first_line(error)}); use --{self.option} offline, or off"
            ) from None
        write_text(id_file, opened.id)
        opened.begin(begun, known is None)
        return opened

    def _read_id(self, path: Path) -> str:
        try:
            return read_regular(path, LONGEST_ID).decode()
        except (OSError, ValueError) as error:
            raise UserError(f"{path} holds no id of {self.name} ({error}); remove it, for a new one") from None


class TrackedRun(Sink):
    """A tracker's run. It gets each value of a step once, also where steps are taken again after a resume."""

    id: str
    only_numbers: ClassVar[bool] = True

    @abstractmethod
    def log(self, values: dict[str, float], step: int) -> None:
        """Send the values of a step."""

    def begin(self, begun: Begun, is_new: bool) -> None:
        """Note what the tracker has of a run that goes on. One that is new to it gets all up to here."""
        self._sent = {(record["step"], name) for record in begun.records for name in record if not is_new}
        for record in begun.records if is_new else ():
            if record["step"] <= begun.step:
                self.write(record)

    def write(self, record: dict[str, Any]) -> None:
        step = record["step"]
        values = {
            name: value
            for name, value in record.items()
            if name != "step" and (is_number(value) or not self.only_numbers) and (step, name) not in self._sent
        }
        try:
            if values:
                self.log(values, step)
        except Exception as error:  # a service that is down costs a record, not the run
            raise OSError(_first_line(error)) from None


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # it is imported, and does not say from where
        return True


def folder_of(run: Path, name: str) -> Path:
    """Return the folder of a run in which a tracker writes, made where it is not there. Raises UserError for a link."""
    folder = run / name
    if folder.is_symlink():
        raise UserError(f"{folder} is a link, through which nothing is written; remove it")
    folder.mkdir(exist_ok=True)
    return folder


def need_variable(option: str, *names: str) -> None:
    """Raise UserError where no environment variable of these names is set, by which an `option` is online."""
    if not any(os.environ.get(name) for name in names):
        raise UserError(
            f"{option}=online needs {' or '.join(names)} in the environment; set it, or use --{option} offline"
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

"""Records of a run for Weights & Biases. The package wandb (extra `wandb`) is imported only here."""

from pathlib import Path
from typing import Any

from dtgpt.config.sections import LogConfig
from dtgpt.run.records import Begun, Sink
from dtgpt.train.observer import Observer
from dtgpt.util.errors import UserError
from dtgpt.util.storage import read_regular, write_text

LONGEST_ID = 1000  # bytes


class WandbObserver(Observer):
    """Send what a run records to Weights & Biases."""

    def __init__(self, log: LogConfig, steps: int):
        """Raise UserError where wandb cannot serve."""
        self._log, wandb = log, import_wandb()
        if log.wandb == "online" and not wandb.login(prompt=False):
            raise UserError(
                "log.wandb=online needs a login; run wandb login, set WANDB_API_KEY, or use --log.wandb offline"
            )

    def sink(self, begun: Begun) -> Sink:
        return Wandb(begun.run, self._log, begun.recipe)


class Wandb(Sink):
    """A run at Weights & Biases. Where it goes on it keeps its id, which is in `wandb-id`."""

    def __init__(self, run: Path, log: LogConfig, recipe: dict[str, Any]):
        wandb, id_file = import_wandb(), run / "wandb-id"
        known = _read_id(id_file) if id_file.is_file() else None  # what else is there is replaced
        try:
            self._run = wandb.init(
                project=log.wandb_project,
                name=run.name,
                id=known,
                resume="allow" if known else None,
                dir=run,
                mode=log.wandb,
                config=recipe,
            )
        except wandb.errors.Error as error:
            raise UserError(f"wandb cannot start ({error}); use --log.wandb offline, or off") from None
        write_text(id_file, self._run.id)

    def write(self, record: dict[str, Any]) -> None:
        self._run.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


def import_wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError(
            "log.wandb needs the package wandb; run pip install 'dtgpt[wandb]', or use --log.wandb off"
        ) from None
    return wandb


def _read_id(path: Path) -> str:
    """Return the id in a file of the run. Raises UserError."""
    try:
        return read_regular(path, LONGEST_ID).decode()
    except (OSError, ValueError) as error:
        raise UserError(f"{path} holds no id of Weights & Biases ({error}); remove it, for a new one") from None

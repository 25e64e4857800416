"""Records of a run for Weights & Biases. The package wandb (extra `wandb`) is imported only here."""

from typing import Any, cast

from dtgpt.charts import LogFields
from dtgpt.charts.trackers import TrackedRun, Tracker
from dtgpt.config.sections import LogConfig
from dtgpt.run.records import Begun
from dtgpt.util.errors import UserError


class WandbObserver(Tracker):
    """Send what a run records to Weights & Biases."""

    name, option, packages = "wandb", "log.wandb", ("wandb",)

    def check(self, log: LogConfig) -> None:
        import wandb

        self._log = cast(LogFields, log)
        if self._log.wandb == "online" and not wandb.login(prompt=False):
            raise UserError(
                "log.wandb=online needs a login; run wandb login, set WANDB_API_KEY, or use --log.wandb offline"
            )

    def open(self, begun: Begun, known: str | None) -> TrackedRun:
        import wandb

        return _Run(
            wandb.init(
                project=self._log.wandb_project,
                name=begun.run.name,
                id=known,
                resume="allow" if known else None,
                dir=begun.run,
                mode=cast(Any, self._log.wandb),  # none of "off"
                config=begun.recipe,
            )
        )


class _Run(TrackedRun):
    only_numbers = False

    def __init__(self, run: Any):
        self._run, self.id = run, run.id

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)

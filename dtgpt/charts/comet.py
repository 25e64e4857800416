"""Records of a run for Comet. The package comet_ml (extra `comet`) is imported only here."""

import os
from typing import Any
from uuid import uuid4

from dtgpt.charts.trackers import TrackedRun, Tracker, folder_of
from dtgpt.config.sections import LogConfig
from dtgpt.run.records import Begun
from dtgpt.util.errors import UserError

# What Comet would take of the process by itself.
UNASKED = (
    *(f"log_{name}" for name in ("code", "graph", "git_metadata", "git_patch", "env_details")),
    *(f"auto_{name}_logging" for name in ("output", "param", "metric")),
    "parse_args",
)


class Offline(Tracker):
    """Keep what a run records as archives in its folder, one for each start, for `comet upload`."""

    name, option, packages = "comet", "trackers.comet", ("comet_ml",)

    def open(self, begun: Begun, known: str | None) -> TrackedRun:
        comet_ml = import_comet()
        config = dict.fromkeys(UNASKED, False) | {"name": begun.run.name, "display_summary_level": 0}
        if not self.online:
            config["offline_directory"] = str(folder_of(begun.run, self.name))
        experiment = comet_ml.start(
            online=self.online,
            project_name=begun.recipe["trackers"]["project"],
            experiment_key=known or uuid4().hex,
            mode="get" if known else "create",
            experiment_config=comet_ml.ExperimentConfig(**config),
        )
        experiment.log_parameters(begun.values)
        return _Run(experiment)


class Online(Offline):
    """Send what a run records to Comet."""

    online = True

    def check(self, log: LogConfig) -> None:
        if not import_comet().get_config("comet.api_key"):
            raise UserError(
                f"{self.option}=online needs a login; run comet login, set COMET_API_KEY, or use "
                f"--{self.option} offline"
            )


class _Run(TrackedRun):
    def __init__(self, experiment: Any):
        self._experiment, self.id = experiment, experiment.get_key()

    def log(self, values: dict[str, float], step: int) -> None:
        self._experiment.log_metrics(values, step=step)

    def close(self, failed: bool) -> None:
        if failed:
            self._experiment.add_tag("failed")
        self._experiment.end()


def import_comet() -> Any:
    os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # else its import changes torch
    import comet_ml

    return comet_ml

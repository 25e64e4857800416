"""Records of a run for Trackio. The package trackio (extra `trackio`) is imported only here."""

import os
from typing import Any
from uuid import uuid4

from dtgpt.charts.trackers import TrackedRun, Tracker, need_variable
from dtgpt.config.sections import LogConfig
from dtgpt.run.records import Begun
from dtgpt.util.errors import UserError

ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class Offline(Tracker):
    """Send what a run records to Trackio's folder on this machine."""

    name, option, packages = "trackio", "trackers.trackio", ("trackio",)

    def check(self, log: LogConfig) -> None:
        for name in ELSEWHERE:
            if os.environ.get(name):
                raise UserError(
                    f"{self.option}=offline, but {name} names another place; unset it, or use --{self.option} online"
                )

    def open(self, begun: Begun, known: str | None) -> TrackedRun:
        import trackio

        # Trackio goes on with a run by its name, which runs of other folders may have.
        name = known or f"{begun.run.name}-{uuid4().hex[:8]}"
        return _Run(
            trackio.init(
                project=begun.recipe["trackers"]["project"],
                name=name,
                config=begun.values,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        )


class Online(Offline):
    """Send what a run records to a Space of Hugging Face, or to a server."""

    online = True

    def check(self, log: LogConfig) -> None:
        need_variable(self.option, *ELSEWHERE)


class _Run(TrackedRun):
    def __init__(self, run: Any):
        self._run, self.id = run, run.name

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()

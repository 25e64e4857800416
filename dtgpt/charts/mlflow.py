"""Records of a run for MLflow. The package mlflow (extra `mlflow`) is imported only here."""

import os
import time
from typing import Any, ClassVar

from dtgpt.charts.trackers import TrackedRun, Tracker, folder_of, need_variable
from dtgpt.config.sections import LogConfig
from dtgpt.run.records import Begun

LONGEST_VALUE = 6000  # characters of a parameter
MOST_PARAMS = 100  # of a message


class Offline(Tracker):
    """Send what a run records to a database in its folder."""

    name, option = "mlflow", "trackers.mlflow"
    packages: ClassVar[tuple[str, ...]] = ("mlflow", "sqlalchemy", "alembic")

    def open(self, begun: Begun, known: str | None) -> TrackedRun:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing is sent that nobody asked for
        import mlflow

        uri = artifacts = None
        if not self.online:
            folder = folder_of(begun.run, self.name).absolute()
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
        return _Run(mlflow, mlflow.MlflowClient(tracking_uri=uri), begun, known, artifacts)


class Online(Offline):
    """Send what a run records to MLflow's server."""

    packages, online = ("mlflow",), True

    def check(self, log: LogConfig) -> None:
        need_variable(self.option, "MLFLOW_TRACKING_URI")


class _Run(TrackedRun):
    def __init__(self, mlflow: Any, client: Any, begun: Begun, known: str | None, artifacts: str | None):
        self._entities, self._client = mlflow.entities, client
        if known is None:
            project = begun.recipe["trackers"]["project"]
            found = client.get_experiment_by_name(project)
            place = found.experiment_id if found else client.create_experiment(project, artifacts)
            known = client.create_run(place, run_name=begun.run.name).info.run_id
        self.id = known
        client.update_run(known, status="RUNNING")
        held = client.get_run(known).data.params
        values = {name: str(value)[:LONGEST_VALUE] for name, value in begun.values.items()}
        params = [mlflow.entities.Param(name, value) for name, value in values.items() if name not in held]
        for begin in range(0, len(params), MOST_PARAMS):
            client.log_batch(known, params=params[begin : begin + MOST_PARAMS])
        for name, value in values.items():
            if held.get(name, value) != value:  # a parameter cannot change, and a tag can
                client.set_tag(known, name, value)

    def log(self, values: dict[str, float], step: int) -> None:
        now, metric = int(1000 * time.time()), self._entities.Metric
        self._client.log_batch(self.id, metrics=[metric(name, value, now, step) for name, value in values.items()])

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")

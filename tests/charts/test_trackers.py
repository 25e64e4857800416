"""What runs send to MLflow, Trackio and Comet, whose own packages write it and read it back."""

import json
import sqlite3
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtgpt.charts import comet, mlflow, trackers, trackio
from dtgpt.charts.trackers import TrackedRun
from dtgpt.run.folder import values_of
from dtgpt.run.records import Begun, read_records
from dtgpt.train.loop import train
from dtgpt.util.errors import UserError
from tests.support.runs import change, newest_run

VARIABLES = ("MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "COMET_API_KEY")


@pytest.fixture(autouse=True)
def away(monkeypatch, tmp_path):
    """Nothing of this machine's own settings and folders."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)


def with_tracker(recipe, name: str):
    section = {name: "offline", "project": "mine"}
    return change(recipe, trackers=section, log={"interval": 1, "sample_tokens": 0}, steps=2)


def of_mlflow(run: Path):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow' / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    points = [
        (m.step, name, m.value)
        for name in found.data.metrics
        for m in client.get_metric_history(found.info.run_id, name)
    ]
    assert found.info.status == "FINISHED" and found.info.run_name == run.name
    changed = {name: value for name, value in found.data.tags.items() if not name.startswith("mlflow.")}
    assert changed.pop("steps") == "3" and set(changed) <= {"resume"}
    return found.info.run_id, found.data.params, points


def of_trackio(run: Path):
    import trackio.utils

    with sqlite3.connect(trackio.utils.TRACKIO_DIR / "mine.db") as database:
        rows = [
            row
            for row in database.execute("SELECT run_name, step, metrics FROM metrics")
            if row[0].startswith(run.name)
        ]
        name = (run / "trackio-id").read_text()
        configs = [
            json.loads(text) for (text,) in database.execute("SELECT config FROM configs WHERE run_name = ?", [name])
        ]
    assert {row[0] for row in rows} == {name}
    points = [(step, key, value) for _, step, text in rows for key, value in json.loads(text).items()]
    return name, {key: str(value) for key, value in configs[-1].items()}, points


def of_comet(run: Path):
    params, points, keys, ways = {}, [], set(), []
    for archive in sorted((run / "comet").glob("*.zip")):
        with zipfile.ZipFile(archive) as file:
            about = json.loads(file.read("experiment.json"))
            messages = [json.loads(line) for line in file.read("messages.json").splitlines()]
        keys.add(about["offline_id"])
        ways.append(about["resume_strategy"])
        payloads = [message["payload"] for message in messages]
        params |= {p["param"]["paramName"]: str(p["param"]["paramValue"]) for p in payloads if "param" in p}
        points += [
            (p["metric"]["step"], p["metric"]["metricName"], p["metric"]["metricValue"])
            for p in payloads
            if "metric" in p
        ]
    (key,) = keys
    assert sorted(ways) == ["create", "get"]  # of the upload of each start
    return key, params, [point for point in points if point[1] != "process duration"]


@pytest.mark.slow(30)
@pytest.mark.parametrize("name, package, read", [
    ("mlflow", "mlflow", of_mlflow), ("trackio", "trackio", of_trackio), ("comet", "comet_ml", of_comet),
])  # fmt: skip
def test_records_and_recipe_go_to_a_tracker_and_a_resume_goes_on_with_its_run(recipe, name, package, read):
    if not trackers.is_installed(package):
        pytest.skip(f"{package} is not installed")
    if name == "mlflow":
        pytest.importorskip("alembic")
    recipe = with_tracker(recipe, name)
    assert train(recipe) == 0
    run = newest_run(recipe)
    known = (run / f"{name}-id").read_text()
    assert train(change(recipe, steps=3, resume=str(run))) == 0
    records = read_records(run / "metrics.jsonl")
    key, params, points = read(run)
    assert key == known == (run / f"{name}-id").read_text()
    sent = [(r["step"], value, r[value]) for r in records for value in r if value != "step" and r[value] is not None]
    assert {step for step, *_ in sent} == {1, 2, 3}
    assert sorted(points) == sorted(sent)  # each once, by the names of metrics.jsonl
    wanted = {option: str(value) for option, value in values_of(recipe).items()}
    same = {option for option, value in wanted.items() if params.get(option) == value}
    assert {"model.hidden_size", "optimizer.lr", "trackers.project"} <= same and params["steps"] in ("2", "3")


class Kept(TrackedRun):
    def __init__(self):
        self.points = []

    def log(self, values, step):
        if step == 9:
            raise RuntimeError("no route\nto the host")
        self.points.append((step, values))


def begun(tmp_path, records, step):
    return Begun(tmp_path, step, {}, {}, [{"step": s, "loss": float(s)} for s in records])


def test_a_tracker_has_each_value_once_and_one_that_is_new_gets_the_past(tmp_path):
    old, new = Kept(), Kept()
    old.begin(begun(tmp_path, [1, 2, 3], 2), is_new=False)  # killed after step 3, whose loss it has
    new.begin(begun(tmp_path, [1, 2, 3], 2), is_new=True)
    for sink in (old, new):
        sink.write({"step": 3, "loss": 3.0, "validation_loss": 2.0, "name": "x", "none": None, "is": True})
    assert old.points == [(3, {"validation_loss": 2.0})]
    assert new.points == [(1, {"loss": 1.0}), (2, {"loss": 2.0}), (3, {"loss": 3.0, "validation_loss": 2.0})]
    with pytest.raises(OSError, match=r"^no route$"):  # which the report says, and the run goes on
        old.write({"step": 9, "loss": 1.0})


@pytest.mark.parametrize("name, package", [("mlflow", "sqlalchemy"), ("trackio", "trackio"), ("comet", "comet_ml")])
def test_a_package_that_is_missing_is_told_before_a_run_begins(recipe, name, package, monkeypatch, tmp_path):
    monkeypatch.setattr(trackers, "find_spec", lambda asked: None if asked == package else "there")
    words = rf"^trackers\.{name} needs the package {package}; run pip install 'dtgpt\[{name}\]', or use --trackers"
    with pytest.raises(UserError, match=words):
        train(with_tracker(recipe, name))
    assert not (tmp_path / "runs").exists()


def test_what_is_asked_of_the_environment_is_told(recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(trackers, "find_spec", lambda asked: "there")
    monkeypatch.setitem(sys.modules, "comet_ml", SimpleNamespace(get_config=lambda name: None))
    log = recipe.log
    with pytest.raises(UserError, match=r"online needs MLFLOW_TRACKING_URI in the environment; set it, or use"):
        mlflow.Online(log, 1)
    with pytest.raises(UserError, match=r"online needs TRACKIO_SPACE_ID or TRACKIO_SERVER_URL in"):
        trackio.Online(log, 1)
    with pytest.raises(UserError, match="needs a login; run comet login, set COMET_API_KEY"):
        comet.Online(log, 1)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "a/b")
    trackio.Online(log, 1)
    with pytest.raises(UserError, match="offline, but TRACKIO_SPACE_ID names another place"):
        trackio.Offline(log, 1)
    with pytest.raises(UserError, match=r"trackers\.project=mine has no effect without a tracker"):
        change(recipe, trackers={"project": "mine"}).validate()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mlflow").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link, through which nothing is written"):
        trackers.folder_of(tmp_path, "mlflow")

"""Every alteration of a run's files is found, named and located."""

import shutil

import pytest

from dtgpt.config.sections import OptimizerConfig
from dtgpt.receipts import audit as auditing
from dtgpt.receipts.audit import audit
from dtgpt.receipts.book import FILE
from tests.support.altered_runs import ALTERATIONS
from tests.support.audits import audited, tiny, train_with_receipts

BY_TWO = {"a gradient": "dp2", "a weight and its receipt": "pp2"}  # each rank holds a part, whose findings are joined
pytestmark = pytest.mark.slow(7)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run, and another one with another seed."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = tiny(folder)
    for name, seed in (("run", 1), ("other", 2)):
        options = {"optimizer": OptimizerConfig(lr=1e-2, schedule="constant"), "seed": seed, "runs": str(folder / name)}
        train_with_receipts(recipe, steps=8, parts=1, reduce="exact", **options).rename(folder / f"{name}-run")
    return folder


@pytest.fixture
def run(runs, tmp_path, monkeypatch):
    """A copy of the run, which no two tests share, beside the receipts of the other one."""
    shutil.copytree(runs / "run-run", tmp_path / "run")
    (tmp_path / "other").mkdir()
    shutil.copy(runs / "other-run" / FILE, tmp_path / "other")
    monkeypatch.setattr(auditing, "start_processes", audited)
    return tmp_path / "run"


@pytest.mark.parametrize("name", ALTERATIONS)
def test_is_found(run, name):
    altered = ALTERATIONS[name]
    altered.work(run)
    if altered.step_to_audit is None:
        problems = audit(run, None, 1, "single", None, None)["problems"]
        first = next((problem for problem in problems if altered.named in problem["said"]), problems[0])
    else:
        assert audit(run, None, 1, "single", None, None)["status"] == 0, "the files show it already"
        plan = BY_TWO.get(name, "single")
        first = audit(run, altered.step_to_audit, 1, plan, None, None)["steps"]["first_difference"]
    assert (first["kind"], first["step"]) == (altered.kind, altered.step), first
    assert altered.named in first["said"], first
    if name == "a weight and its receipt":
        assert ", by " in first["said"], "only the second rank holds it"


def test_nothing_is_found_where_nothing_is_altered(run):
    assert audit(run, None, 1, "single", None, None) == {"version": 1, "run": str(run), "problems": [], "status": 0}
    for plan in ("single", "dp2", "pp2"):
        found = audit(run, 4, 2, plan, None, None)
        assert (found["status"], found["steps"]["verdict"], found["steps"]["checkpoint"]) == (0, "equal", 2)

"""Processes that tests and commands start import the code under test, wherever it lies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtgpt.compare import workers
from dtgpt.util.shared import environment
from dtgpt.util.shared.environment import child_environment

ROOT = Path(__file__).parents[2]
FIND = "from importlib.util import find_spec as f; print(f('dtgpt').origin, f('tests').origin)"


def found(folder, environment=None) -> list[str]:
    """The files of dtgpt and tests that a process finds, without installed packages."""
    words = [sys.executable, "-S", "-c", FIND]
    return subprocess.check_output(words, cwd=folder, env=environment, text=True).split()


HERE = [str(ROOT / name / "__init__.py") for name in ("dtgpt", "tests")]


def test_processes_that_tests_start_find_the_code_under_test(tmp_path):
    assert found(tmp_path) == HERE


@pytest.mark.parametrize("path", [None, "", "elsewhere", f"elsewhere{os.pathsep}{ROOT}", str(ROOT)])
def test_a_child_finds_the_package_that_its_parent_runs(tmp_path, monkeypatch, path):
    monkeypatch.delenv("PYTHONPATH")
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)
    assert found(tmp_path, child_environment()) == HERE
    assert ("elsewhere" in child_environment()["PYTHONPATH"].split(os.pathsep)) == ("elsewhere" in (path or ""))


def test_an_installed_package_changes_no_path(tmp_path, monkeypatch):
    file = tmp_path / "site-packages" / "dtgpt" / "util" / "shared" / "environment.py"
    monkeypatch.setattr(environment, "__file__", str(file))
    monkeypatch.delenv("PYTHONPATH")
    assert "PYTHONPATH" not in child_environment()


def test_the_processes_that_run_a_plan_find_the_package(tmp_path, monkeypatch):
    given = []

    def run(words, env, **_):
        given.append(env)
        return subprocess.CompletedProcess(words, 1, "dtgpt: no\n", "")

    monkeypatch.setattr(workers.subprocess, "run", run)
    monkeypatch.delenv("PYTHONPATH")
    assert workers.run_workers(2, ["record"]) == "no"
    monkeypatch.undo()
    assert found(tmp_path, given[0]) == HERE

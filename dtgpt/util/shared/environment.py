"""The environment of Python processes that dtgpt starts, and the cores that they may use."""

import os
from pathlib import Path


def child_environment() -> dict[str, str]:
    """Return this process's environment variables for a Python process that it starts, which imports this dtgpt: where
    the package is in no folder of installed packages, its folder comes first in PYTHONPATH."""
    folder = Path(__file__).resolve().parents[3]
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if folder.name not in ("site-packages", "dist-packages") and str(folder) not in path[:1]:
        path.insert(0, str(folder))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)} if path else dict(os.environ)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

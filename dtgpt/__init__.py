"""dtgpt: write GPT once as plain modules; change the parallel plan, keep the loss curve."""

import os

# Waiting OpenMP threads that spin can make two threads ten times slower than one on a busy CPU. To be set before
# torch is loaded, hence here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"


def __getattr__(name: str):
    """`dtgpt.load` and `dtgpt.Plan`: torch is imported when they are asked for, so that a command answers at once."""
    if name == "load":
        from dtgpt.inference.load import load

        return load
    if name == "Plan":
        from dtgpt.config.plan import Plan

        return Plan
    raise AttributeError(f"module 'dtgpt' has no attribute {name!r}")

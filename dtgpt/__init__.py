"""dtgpt: write GPT once as plain modules; change the parallel plan, keep the loss curve."""

import os

# Waiting OpenMP threads that spin can make two threads ten times slower than one on a busy CPU. To be set before
# torch is loaded, hence here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Where a process is lost, torch warns with 30 lines of C++ frames before dtgpt's own sentence. Its errors, such as
# those of NCCL's watchdog, are still printed. To be set before torch is loaded, too.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

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

"""Train GPTs on PyTorch: write the model as plain modules, change the parallel plan, keep the loss curve.

Importing this costs next to nothing: names are imported when they are asked for, since torch takes seconds and `dtgpt
--help` needs none of it. What must be set before torch is loaded stands here, for no other file of dtgpt is executed
earlier.

`load` opens a model to generate and score, `Recipe` and `Plan` describe a run, `open_trainer` trains by a loop of your
own.
"""

import os

from dtgpt.capabilities import CAPABILITIES
from dtgpt.util import seams

# Waiting OpenMP threads that spin can make two threads ten times slower than one on a busy CPU. To be set before
# torch is loaded, hence here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Where a process is lost, torch warns with 30 lines of C++ frames before dtgpt's own sentence. Its errors, such as
# those of NCCL's watchdog, are still printed. To be set before torch is loaded, too.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

__version__ = "0.9.1"

seams.use(module for module, _ in CAPABILITIES)  # imported when the core asks for them
seams.load("dtgpt.moved:serve_old_names")()

PUBLIC = {  # imported when it is asked for, so that a command answers at once
    "Plan": "dtgpt.config.plan:Plan",
    "Recipe": "dtgpt.config.recipe:Recipe",
    "open_trainer": "dtgpt.train.setup:open_trainer",
}


def __getattr__(name: str):
    if name not in PUBLIC and name not in seams.added("public"):
        raise AttributeError(f"module 'dtgpt' has no attribute {name!r}")
    return seams.load((PUBLIC | seams.added("public"))[name])


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC, *seams.added("public")])

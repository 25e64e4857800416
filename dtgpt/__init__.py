"""dtgpt: write GPT once as plain modules; change the parallel plan, keep the loss curve."""

import os

# Waiting OpenMP threads that spin can make two threads ten times slower than one on a busy CPU. To be set before
# torch is loaded, hence here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"

"""Memory that tensors on the CPU have freed is used again."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from dtgpt.util.machine.machine import keep_freed_memory

keep_freed_memory()
for turn in range(20):
    if turn == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    x = torch.ones(1 << 22)  # 16 MiB, 4,096 pages
    y = x * 2
    del x, y
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow(4)
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is glibc's")
@pytest.mark.parametrize("variables, kept", [({}, True), ({"MALLOC_TOP_PAD_": "131072"}, False)])
def test_freed_memory_is_used_again_unless_the_environment_says_how(variables, kept):
    others = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM]  # a fork would have the allocator of its parent
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**others, **variables})
    # Ten turns touch 81,920 pages. The heap may grow once more by a tensor, as its pieces lie: 4,096 of them.
    assert (int(done.stdout) < 10_000) == kept, done.stdout

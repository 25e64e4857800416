"""Optimizers and architectures are known by name, and imported where a run has one of them."""

import subprocess
import sys

import pytest

from dtgpt.config.recipe_file import kinds
from dtgpt.models.config import architectures, class_of
from dtgpt.util.seams import load

OTHERS = ["gemma3", "gpt_neo", "gpt_oss", "granitemoe", "mixtral", "olmo3", "olmoe", "qwen2_moe", "qwen3_moe", "track3"]
PROGRAM = """
import sys
import dtgpt.train.loop
print(*(name for name in sys.modules if name.startswith(("dtgpt.models.", "dtgpt.optim."))))
"""


def test_a_name_is_that_of_its_class():
    assert all(load(part).kind == kind for kind, part in kinds().items())
    assert all(load(part).architecture == name for name, part in architectures().items())
    assert len(architectures()) == 2 + len(OTHERS) and kinds().keys() == {"adamw", "muon", "normuon"}
    assert class_of("unknown") is None


@pytest.mark.slow(8)
def test_the_loop_imports_no_optimizer_or_state_that_a_run_may_not_have():
    loaded = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split()
    assert "dtgpt.optim.update" in loaded
    extra = ("muon.muon", "muon.memory", "muon.normuon", "fp8.scales", "z_scores.detector")
    assert not {f"dtgpt.optim.{name}" for name in extra} & set(loaded)

"""Optimizers and architectures are known by name, and imported where a run has one of them."""

import subprocess
import sys
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType

import pytest

import dtgpt.models
import dtgpt.optim
from dtgpt.config.recipe_file import kinds
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.config import ModelConfig, architectures, class_of
from dtgpt.util.seams import load

PROGRAM = """
import sys
import dtgpt.train.loop
print(*(name for name in sys.modules if name.startswith(("dtgpt.models.", "dtgpt.optim."))))
"""


def classes_in(package: ModuleType, base: type, name: str) -> list[type]:
    """Return the classes of a package that derive from `base` and give themselves another name than their base has."""
    modules = [import_module(found.name) for found in walk_packages(package.__path__, f"{package.__name__}.")]
    own = [(value, module.__name__) for module in modules for value in vars(module).values() if isinstance(value, type)]
    return [
        kind
        for kind, module in own
        if issubclass(kind, base) and kind.__module__ == module and isinstance(vars(kind).get(name), str)
    ]


@pytest.mark.parametrize(
    ("package", "base", "name", "known", "least"),
    [
        (dtgpt.models, ModelConfig, "architecture", architectures(), {"gpt2", "llama", "olmo3"}),
        (dtgpt.optim, OptimizerConfig, "kind", kinds(), {"muon", "normuon"}),
    ],
)
def test_each_family_and_optimizer_is_known_by_its_name(package, base, name, known, least):
    found = {getattr(kind, name): kind for kind in classes_in(package, base, name)}
    assert found.keys() >= least  # or nothing would be looked at
    assert {each: load(known[each]) for each in found} == found
    assert all(getattr(load(part), name) == each for each, part in known.items())


def test_a_name_that_no_class_has_is_none_of_dtgpts():
    assert class_of("unknown") is None


@pytest.mark.slow(8)
def test_the_loop_imports_no_optimizer_or_state_that_a_run_may_not_have():
    loaded = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split()
    assert "dtgpt.optim.update" in loaded
    extra = ("muon.muon", "muon.memory", "muon.normuon", "fp8.scales", "z_scores.detector")
    assert not {f"dtgpt.optim.{name}" for name in extra} & set(loaded)

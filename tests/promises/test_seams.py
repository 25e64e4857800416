"""What is one file each: a word or an attribute of one kind stands in its own room, nowhere else."""

import re

import pytest

from tests.promises.test_layers import ROOT


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_no_file_outside_the_rooms_of_optimizers_names_one(name):
    """But kernels, configuration, lists of modules, and states of other libraries' optimizers."""
    own = (
        "optim", "ops/optim", "ops/kernels", "config", "posttrain", "interop", "translate", "capabilities.py",
        "moved.py",
    )  # fmt: skip
    files = [file.relative_to(ROOT) for file in sorted(ROOT.rglob("*.py")) if name in file.read_text().lower()]
    assert not [str(file) for file in files if not any(file.is_relative_to(room) for room in own)]


def files_with(pattern: str) -> list[str]:
    """Return the files of the package in which a line matches."""
    found = re.compile(pattern, re.MULTILINE)
    files = sorted(ROOT.rglob("*.py"))
    return [str(file.relative_to(ROOT)) for file in files if found.search(file.read_text())]


def test_one_function_writes_what_modules_are_bound_to():
    assert files_with(r"\.bound = |setattr\(\w+, .bound.") == ["models/binding.py"]


def test_nothing_replaces_the_forward_of_a_module():
    assert files_with(r"\.forward = |setattr\(\w+, .forward.|del \w+\.forward") == []


def test_one_file_takes_all_blocks_for_alike():
    """That of llm.c's format, in which they are."""
    alike = r"replace\([^)]*num_layers=1|num_layers \* |\d \* (self\.)?(config|model)\.num_layers"
    assert files_with(alike) == ["interop/llmc.py"]

"""What is one file each: a word or an attribute of one kind stands in its own room, nowhere else."""

from tests.promises.test_layers import ROOT


def test_no_file_outside_the_rooms_of_optimizers_names_one():
    """But configuration, and states of other libraries' optimizers."""
    own = ("optim", "ops/optim", "config", "interop")
    files = [file.relative_to(ROOT) for file in sorted(ROOT.rglob("*.py")) if "adamw" in file.read_text().lower()]
    assert not [str(file) for file in files if not any(file.is_relative_to(room) for room in own)]

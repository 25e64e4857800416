"""The program of docs/library.md, as it stands there, in one process and in two, and its checkpoint."""

import re
from pathlib import Path

import pytest

import dtgpt
from dtgpt.checkpoint.manifest import step_folder
from tests.support.programs import TORCHRUN, run_program

PAGE = (Path(__file__).parents[2] / "docs/library.md").read_text()


@pytest.mark.slow(10)
def test_the_program_has_the_same_losses_in_two_processes_and_can_be_loaded(tmp_path):
    pieces = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(pieces) == 4
    (tmp_path / "own_loop.py").write_text("\n".join(pieces))
    said = []
    for plan, launcher in (("single", []), ("tp2", [*TORCHRUN, "--nproc-per-node", "2"])):
        folder = tmp_path / plan
        folder.mkdir()
        done = run_program([*launcher, tmp_path / "own_loop.py", plan], folder)
        assert done.returncode == 0, done.stderr
        said.append(re.findall(r"step (\d+): loss ([\d.]+), gradient norm ([\d.]+)", done.stdout))
        assert done.stdout.count("largest gradient: ") == 2 and "validation loss " in done.stdout
    assert [step for step, *_ in said[0]] == ["5", "10", "15", "20"]
    for (_, loss, norm), (_, other_loss, other_norm) in zip(*said, strict=True):
        assert float(loss) == pytest.approx(float(other_loss), rel=1e-5)
        assert float(norm) == pytest.approx(float(other_norm), rel=1e-3)
    again = run_program([tmp_path / "own_loop.py", "single"], tmp_path / "tp2")  # a run that has ended
    assert again.returncode == 0 and "step " not in again.stdout
    assert dtgpt.load(step_folder(tmp_path / "tp2" / "own_run" / "checkpoints", 20)).config.num_layers == 2


def test_the_public_names_are_listed():
    assert {"load", "Plan", "Recipe", "open_trainer"} <= set(dir(dtgpt))
    for name in ("Plan", "Recipe", "open_trainer"):
        assert getattr(dtgpt, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dtgpt.nothing

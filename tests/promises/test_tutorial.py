"""The commands of docs/tutorial.md, as they stand there, in one folder."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.support.programs import run_program

ROOT = Path(__file__).parents[2]
COMMANDS = re.findall(
    r"^dtgpt .*$", "\n".join(re.findall(r"```sh\n(.*?)```", (ROOT / "docs/tutorial.md").read_text(), re.S)), re.M
)


@pytest.mark.long
def test_each_command_works(tmp_path):
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    for line in COMMANDS:
        command, _, otherwise = line.partition(" || ")
        done = run_program(["-m", *shlex.split(command)], tmp_path, timeout=300)
        assert done.returncode == (1 if otherwise else 0), (line, done.stdout[-500:], done.stderr)
        if "compare runs/one-001 runs/two-001" in line:
            assert "equal within rounding" in done.stdout
        if otherwise:
            assert "optimizer.weight_decay  A 2.0  B 1.9" in done.stdout
    assert len(COMMANDS) == 11 and (tmp_path / "hf_model" / "model.safetensors").is_file()

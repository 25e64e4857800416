"""`dtgpt recipe`: the recipes and job files that come with dtgpt, as files to begin with."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from dtgpt.cli import main
from dtgpt.train.start import load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = [
    *sorted((ROOT / "recipes").glob("*.py")),
    *(ROOT / "recipes" / name for name in ("slurm.sbatch", "pytorchjob.yaml", "skypilot.yaml")),
]


def run(words, capsys) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["recipe", *words])
    return stop.value.code or 0, *capsys.readouterr()


def test_each_recipe_is_listed_with_its_title(capsys):
    code, out, _ = run([], capsys)
    assert run(["--list"], capsys)[:2] == (code, out)
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == [path.stem for path in RECIPES]
    title = "GPT-2 345M with the settings of Megatron-LM's examples/pretrain_gpt.sh."
    assert re.search(rf"^gpt2_345m +{re.escape(title)}$", out, re.MULTILINE)
    assert re.search(r"^slurm +Train a recipe on several nodes: .*\.$", out, re.MULTILINE)
    assert re.search(r"^pytorchjob +Train a recipe on several nodes of a Kubernetes cluster, .*\.$", out, re.MULTILINE)


def test_a_recipe_is_printed_as_it_is(capsys, tmp_path):
    code, out, _ = run(["gpt2_345m"], capsys)
    assert code == 0 and out == (ROOT / "recipes" / "gpt2_345m.py").read_text()
    own = tmp_path / "mine.py"
    own.write_text(out)
    assert load_recipe(own, []).model.num_layers == 24


@pytest.mark.parametrize("name", ["slurm", "slurm.sbatch", "pytorchjob"])
def test_a_job_file_is_printed_as_it_is(name, capsys):
    code, out, _ = run([name], capsys)
    file = "pytorchjob.yaml" if name == "pytorchjob" else "slurm.sbatch"
    assert code == 0 and out == (ROOT / "recipes" / file).read_text()


def test_a_wheel_is_to_have_every_file_of_the_folder():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    named = {path for pattern in settings["data-files"]["share/dtgpt/recipes"] for path in ROOT.glob(pattern)}
    assert named == {path for path in (ROOT / "recipes").iterdir() if path.is_file()} == set(RECIPES)


@pytest.mark.parametrize("words, told", [
    (["gpt2_345"], "there is no recipe 'gpt2_345'; did you mean gpt2_345m?"),
    (["x" * 300], "; use one of gemma3_1b, gpt2_124m, gpt2_345m, gpt2_tiny"),
    (["gpt2_tiny", "gpt2_345m"], "dtgpt recipe prints one recipe, not 2; give one name"),
    (["gpt2_tiny", "--list"], "--list takes no name, and 'gpt2_tiny' is one; leave out one of them"),
])  # fmt: skip
def test_other_names_are_refused_in_a_sentence(words, told, capsys):
    code, out, error = run(words, capsys)
    assert code == 2 and out == "" and told in error and error.count("\n") == 1


@pytest.mark.long
def test_a_wheel_has_the_recipes(tmp_path):
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if "/share/dtgpt/recipes/" in name]
    assert {Path(name).name for name in names} == {path.name for path in RECIPES}


@pytest.mark.parametrize("command", ["train", "plan", "compare"])
def test_a_command_names_the_recipe_of_a_name(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2_345m", "gpt2_345m.py"):
        with pytest.raises(SystemExit) as stop:
            main([command, name])
        expected = f"there is no recipe file {name}, but dtgpt comes with one: dtgpt recipe gpt2_345m > gpt2_345m.py"
        assert stop.value.code == 2 and expected in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "plan", "compare"])
def test_a_job_file_is_not_called_a_recipe(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main([command, "slurm"])
    assert stop.value.code == 2 and "dtgpt recipe slurm" not in capsys.readouterr().err

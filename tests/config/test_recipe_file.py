"""What is wrong with a recipe file is one sentence that names file and line, whoever runs it."""

import gzip
import pickle
import re
from pathlib import Path

import pytest

from dtgpt.cli import main, run_recipe
from dtgpt.config.recipe_file import call_recipe, recipe_module
from dtgpt.train.start import checked, load_recipe
from dtgpt.util.errors import UserError
from tests.support.programs import run_program
from tests.support.runs import change

RECIPE = """
from dataclasses import replace
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.config.recipe import *
from dtgpt.cli import run_recipe

def tiny(**changes):
    return Recipe(**{{**dict(name="x", model=GPT2Config(num_layers=1, hidden_size=8, num_heads=1, seq_length=8),
        optimizer=OptimizerConfig(lr=1e-3), steps=2, micro_batch_size=1, global_batch_size=2), **changes}})

def recipe({arguments}):
    {body}

if __name__ == "__main__":
    run_recipe(recipe, __doc__)
"""
WRONG = {
    "raises": ("1 / 0", "line 12: ZeroDivisionError: division by zero"),
    "recurses": ("return recipe()", "RecursionError"),
    "exits": ("import sys; sys.exit(3)", "line 12: SystemExit: 3"),
    "nothing": ("pass", "recipe() returns NoneType"),
    "text for a number": ("return tiny(steps='ten')", "steps='ten': a whole number"),
    "bool for a number": ("return tiny(steps=True)", "steps=True: a whole number"),
    "float for a number": ("return tiny(micro_batch_size=8.0)", "micro_batch_size=8.0: a whole number"),
    "no model": ("return tiny(model=None)", "model=None: ModelConfig(...)"),
    "a dict": ("return tiny(optimizer={'lr': 1})", "optimizer={'lr': 1}: OptimizerConfig(...)"),
    "inside": ("return tiny(optimizer=OptimizerConfig(lr='1e-3'))", "optimizer.lr='1e-3': a finite number"),
    "nan": ("return tiny(optimizer=OptimizerConfig(lr=float('nan')))", "optimizer.lr=nan: a finite number"),
    "choice": ("return tiny(device='tpu')", "device='tpu': one of auto, cpu, cuda"),
    "choice of a list": ("return tiny(graph=['on'])", "graph=['on']: one of auto, on, off"),
    "number for a text": ("return tiny(plan=2)", "plan=2: text"),
    "long": ("return tiny(runs=[0] * 10**6)", "runs=[0, 0, 0, 0, 0, 0, ...]: text"),
    "missing": ("return Recipe(name='x')", "TypeError: Recipe.__init__() missing"),
    "several lines": ("raise ValueError('a\\n' * 1000)", "ValueError: a a a"),
}


def write(path, body="return tiny()", arguments=""):
    path.write_text(RECIPE.format(body=body, arguments=arguments))
    return path


@pytest.mark.parametrize("body, words", WRONG.values(), ids=WRONG)
def test_every_command_says_the_same_of_a_wrong_recipe(tmp_path, monkeypatch, capsys, body, words):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "mine.py", body)
    for command in (["train"], ["plan"], ["compare", "--plans", "dp2"]):
        with pytest.raises(SystemExit) as stop:
            main([command[0], str(path), *command[1:]])
        err = capsys.readouterr().err
        assert stop.value.code == 2 and err.startswith("dtgpt: ") and err.count("\n") == 1 and len(err) < 600
        assert words in err.replace(" is not valid; use ", ": ")
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".pyc" and p.name != "__pycache__"] == ["mine.py"]


def test_a_recipe_that_takes_an_argument_is_refused(tmp_path):
    with pytest.raises(UserError, match="missing 1 required positional argument: 'size'; correct the recipe"):
        load_recipe(write(tmp_path / "mine.py", arguments="size"), [])


@pytest.mark.parametrize(
    "text, words",
    [
        (b"def recipe(:\n", "line 1: invalid syntax"),
        (b"x = '\xff'\n", "mine.py.*utf-8"),
        (b"raise SystemExit\n", "line 1: SystemExit"),
        (b"import nowhere\n", "line 1: ModuleNotFoundError: No module named 'nowhere'"),
        (b"x = \0\n", "mine.py.*null bytes"),
    ],
)
def test_a_file_that_cannot_be_run_is_one_sentence(tmp_path, text, words):
    path = tmp_path / "mine.py"
    path.write_bytes(text)
    with pytest.raises(UserError, match=words) as error:
        load_recipe(path, [])
    assert "\n" not in str(error.value)


def test_a_recipe_run_as_a_script_says_the_same(tmp_path):
    path = write(tmp_path / "mine.py", "return tiny(steps='ten')")
    done = run_program([path], tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("dtgpt: steps='ten'") and done.stderr.count("\n") == 1


def test_run_recipe_answers_a_function_that_fails(capsys):
    def recipe():
        raise KeyError("x")

    with pytest.raises(SystemExit) as stop:
        run_recipe(recipe, "", [])
    assert stop.value.code == 2 and f"{__file__} line" in capsys.readouterr().err


def test_types_are_checked_in_a_recipe_made_by_a_program_too(recipe):
    for changes in ({"steps": 2.0}, {"model": {"dropout": "0"}}, {"data": {"path": 3}}):
        with pytest.raises(UserError, match="is not valid; use"):
            change(recipe, **changes).validate()
    assert call_recipe(lambda: change(recipe, timeout=60, optimizer={"lr": 1})).timeout == 60


README = Path(__file__).parents[2] / "README.md"


@pytest.mark.slow(3)
def test_the_recipe_of_readme_trains_as_it_is_written(tmp_path, monkeypatch):
    """On a smaller model, and with GPT-2's tokenizer from files: tests fetch nothing."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "run_recipe" in block)
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "my.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    for name in ("vocab.json", "merges.txt"):
        packed = README.parent / "tests" / "fixtures" / "gpt2" / f"{name}.gz"
        (tmp_path / name).write_bytes(gzip.decompress(packed.read_bytes()))
    monkeypatch.chdir(tmp_path)
    recipe = recipe_module(["mine.py"], "train").recipe()
    checked(recipe)
    assert recipe.data.path == "my.txt" and recipe.plan_for(1).world == 1
    options = (
        "--model.num_layers 1 --model.hidden_size 16 --model.num_heads 2 --model.seq_length 8 --device cpu --steps 2"
    )
    options += " --data.vocab_file vocab.json --data.merge_file merges.txt --log.sample_tokens 4 --log.eval_samples 8"
    done = run_program(["mine.py", *options.split()], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "my.txt" in done.stdout and (tmp_path / "runs/mine-001/checkpoints/step_00000002").is_dir()


def test_functions_of_a_recipe_file_can_be_sent_to_processes(tmp_path):
    (tmp_path / "mine.v2.py").write_text("def recipe():\n    return None\n")
    module = recipe_module([str(tmp_path / "mine.v2.py")], "train")
    assert pickle.loads(pickle.dumps(module.recipe)) is module.recipe

"""Every code block of the documentation: command lines are read by the commands that they name, and Python is compiled
and its names of dtgpt are looked up; blocks with `assert` are run. Nothing is trained.

Bash itself expands the blocks, with no program to be found, so that it tells the words of each command.
"""

import argparse
import ast
import builtins
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import pytest

from dtgpt import cli
from dtgpt.commands import train
from dtgpt.commands.command import Command
from dtgpt.compare import command as compare
from dtgpt.compare.compare import fitting_plan
from dtgpt.config.overrides import take
from dtgpt.config.recipe_file import call_recipe, load_module
from dtgpt.evaluation import harness_command
from dtgpt.inference.library.model import LibraryModel
from dtgpt.inference.options import OPTIONS
from dtgpt.tools.recipes import RecipeCommand
from dtgpt.train.start import load_recipe
from dtgpt.translate import command as translate
from dtgpt.translate.programs import KNOWN
from dtgpt.util.errors import UserError

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("benchmarks/**/*.md"))]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.S | re.M)
PYTHON = {page: "\n".join(code for name, code in FENCE.findall(page.read_text()) if name == "python") for page in PAGES}
BLOCKS = [
    pytest.param(
        match[1], textwrap.dedent(match[2]), PYTHON[page], id=f"{page.name}:{text[: match.start()].count(chr(10)) + 1}"
    )
    for page in PAGES
    for text in [page.read_text()]
    for match in FENCE.finditer(text)
]
# First words of commands that only their own programs could read.
OTHERS = ("apptainer", "conda", "curl", "docker", "hf", "kubectl", "lm_eval", "mkdocs", "mypy", "python3", "ruff",
          "salloc", "sleep", "tensorboard", "touch")  # fmt: skip
OWN_LOOP = "own_loop.py"  # the program of docs/library.md
BASH = r"""
PATH=/nowhere
tell() { printf '%s\0' "$#" "$@" >&3; }
command_not_found_handle() { tell "$@"; }
source() { :; }
[() { ((asked++)); }  # false, then true: the body of a loop is read once
from() { while [[ $# -gt 0 && $1 != dtgpt && $1 != bash && $1 != *.py ]]; do shift; done; "$@"; }
pip() { tell python -m pip "$@"; }
srun() { from "$@"; }
sbatch() { while [[ $1 != *.py ]]; do shift; done; tell python "$@"; }
bash() { eval "$2"; }
python() { if [[ $1 == - ]]; then tell python -c "$(</dev/stdin)"; else tell python "$@"; fi; }
"""
# Where the pages write names of dtgpt without their imports.
MODULES = ("dtgpt", "dtgpt.config.recipe", "dtgpt.config.plan", "dtgpt.config.sections", "dtgpt.models.config",
           "dtgpt.models.roles", "dtgpt.models.binding", "dtgpt.ops.optim.optimizer", "dtgpt.parallel.shards",
           "dtgpt.util.field_types", "dtgpt.planning.memory", "dtgpt.train.observer", "typing")  # fmt: skip


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder with the recipes, those that readers write themselves among them. Commands read their words only."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for name in ("RECIPE.py", "recipe.py", "mine.py", "my_recipe.py"):
        (tmp_path / name).symlink_to(ROOT / "recipes" / "gpt2_345m.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for entry in cli.commands().values():
        module = importlib.import_module(entry.part.partition(":")[0])
        for key, value in vars(module).items():
            if isinstance(value, Command):
                monkeypatch.setattr(module, key, replace(value, work=no_work(value)))
    monkeypatch.setattr(compare, "of_runs", replace(compare.of_runs, work=lambda *paths, options: 0))
    monkeypatch.setattr(harness_command, "evaluate", lambda *arguments: 0)
    monkeypatch.setattr(translate, "show", lambda *arguments: None)
    monkeypatch.setattr(train, "prepare", read_recipe)


class Read(Exception):
    """A command has read its words, and would begin to work."""


def no_work(command):
    def check_recipe(recipe, own, given, path):
        recipe = take(recipe, given)
        recipe.validate()
        for name in getattr(own, "plans", ()):
            replace(recipe, plan=name).alternatives()
            if hasattr(own, "against") and own.random is None:  # dtgpt compare: what it checks before it starts runs
                world = fitting_plan(name, list(own.plans), recipe.plans).world
                replace(recipe, plan=name).plan_for(world)

    return check_recipe if isinstance(command, RecipeCommand) else lambda *paths, options: 0


def read_recipe(recipe, options, world, retry=None):
    recipe = take(recipe, options)
    recipe.validate()
    if recipe.plan != "auto":
        recipe.alternatives()
    raise Read


def dtgpt(words):
    try:
        assert cli._command(words) == 0
    except Read:
        pass
    except UserError as error:
        if not re.match(
            r"there is no file|\S+: No such file|the command has no --", str(error)
        ):  # the latter where `...` stands for it
            raise


def script(file, words):
    """Let a Python file read its words."""
    if Path(file).name in [Path(name).name for name in KNOWN]:
        dtgpt(["translate", "--", file, *words])
    elif file.startswith("benchmarks/"):
        benchmark(ROOT / file, words)
    elif file != OWN_LOOP:
        dtgpt(["train", file, *words])


def benchmark(path, words):
    """Let the argument parser of a benchmark read its words, and a recipe those that are left for it."""
    if "ArgumentParser" not in path.read_text() and "make_parser" not in path.read_text():  # it looks for words itself
        assert all(f'"{word}"' in path.read_text() for word in words)
        return
    module = importlib.import_module(path.stem)
    read_known, read_all = argparse.ArgumentParser.parse_known_args, argparse.ArgumentParser.parse_args
    left = []

    def known(self, *arguments, **options):
        found, rest = read_known(self, *arguments, **options)
        left.extend([vars(found), rest])
        raise Read

    def whole(self, *arguments, **options):
        try:
            read_all(self, *arguments, **options)
        except Read:
            assert not left[1], f"{path.name} has no option {left[1]}"
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", known)
        patch.setattr(argparse.ArgumentParser, "parse_args", whole)
        patch.setattr(sys, "argv", [path.name, *words])
        with pytest.raises(Read):
            module.main()
    recipe = ROOT / "recipes" / ("llama_tiny.py" if "llama" in str(left[0].get("model")) else "gpt2_tiny.py")
    for rest in (left[1], (left[0].get("against") or "").split()):
        load_recipe(recipe, rest)


def python(words):
    if words[0] == "-c":
        compile(words[1], "block", "exec")
    elif words[0] != "-m":
        script(words[0], words[1:])
    elif words[1] == "dtgpt":
        dtgpt(words[2:])
    elif words[1] == "pytest":
        pytest_words(words[2:])
    elif words[1] == "pip":
        known = (ROOT / "pyproject.toml").read_text()
        for extras in re.findall(r"\.\[(.*)\]", " ".join(words)):
            assert all(re.search(rf"^{extra} = \[", known, re.M) for extra in extras.split(",")), extras
    else:
        assert words[1] in ("pdoc", "venv"), words


def pytest_words(words):
    markers = [after for word, after in pairwise(words) if word == "-m"]
    assert all(f'"{name}' in (ROOT / "pyproject.toml").read_text() for name in markers)
    files = [word for word in words if word.startswith("tests") and "/FOLDER/" not in word]
    assert all((ROOT / file).exists() for file in files), files


def torchrun(words):
    from torch.distributed.run import get_args_parser

    found = get_args_parser().parse_args(words)
    python([*(["-m"] if found.module else []), found.training_script, *found.training_script_args])


def commands_of(block):
    """Return the words of each command that bash finds in a block. `...` stands for more of them, and is left out."""
    with open("commands", "wb") as file:
        done = subprocess.run(
            ["/bin/bash", "-c", f"exec 3>&{file.fileno()}\n{BASH}\n{block}"],
            pass_fds=[file.fileno()], capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    wrong = [line for line in done.stderr.splitlines() if "No such file or directory" not in line]
    assert not wrong, wrong
    rest = Path("commands").read_text().split("\0")[:-1]
    found = []
    while rest:
        count = int(rest.pop(0))
        found.append([word for word in rest[:count] if word != "..."])
        del rest[:count]
    return found


def read_commands(block):
    for first, *words in commands_of(block):
        reader = {"dtgpt": dtgpt, "python": python, "torchrun": torchrun, "pytest": pytest_words}.get(first)
        if reader:
            reader(words)
        else:
            assert first in OTHERS, f"{first} is no command that this test can read"


def test_the_commands_of_known_runs_are_right(tmp_path):
    for name in ("345m", "124m", "d12"):  # which the script writes
        (tmp_path / f"known_{name}.py").symlink_to(ROOT / "recipes" / "gpt2_345m.py")
    script = (ROOT / "benchmarks/known_runs.sh").read_text().replace("set -euo pipefail", "")
    read_commands(f"set -- sources.jsonl vocab.json merges.txt\n{script}")


@pytest.mark.slow(3)
@pytest.mark.parametrize("language, block, page", BLOCKS)
def test_a_block_is_right(language, block, page, capsys):
    if language == "sh":
        read_commands(block)
    elif language == "python":
        check_names(block, page)
        if re.search("^assert ", block, re.M):  # a program that says what it shows
            exec(block, {})
    elif block.startswith("$ dtgpt "):  # and what it answers
        line, _, answer = block.partition("\n")
        with pytest.raises(UserError) as error:
            dtgpt(line.split()[2:])
        assert f"dtgpt: {error.value}".startswith(answer.strip())
    else:
        assert language in ("", "mermaid", "yaml")


def test_no_command_stands_outside_of_a_block_that_is_read():
    """An indented block has no language, and no test above reads it."""
    outside = {page.name: FENCE.sub("", page.read_text()) for page in PAGES}
    pattern = re.compile(r"^    ((?:dtgpt|python|torchrun|pytest|import dtgpt)(?: .*)?$)", re.M)
    assert {name: found for name, text in outside.items() if (found := pattern.findall(text))} == {}


def check_names(block, page):
    """Look up what a block imports, every name of dtgpt, and the arguments of its calls. Blocks of one page share what
    they import and define."""
    tree = ast.parse(block)
    names = {}
    own = set(re.findall(r"^ *(?:class|def) (\w+)", page, re.M))
    for line in re.findall(r"^(?:from|import) .*$", page, re.M):
        for node in ast.parse(line).body:
            for one in node.names:
                if isinstance(node, ast.Import):
                    importlib.import_module(one.name)
                    names[one.name.partition(".")[0]] = importlib.import_module(one.name.partition(".")[0])
                else:
                    names[one.asname or one.name] = getattr(importlib.import_module(node.module), one.name)

    def look_up(node):
        if isinstance(node, ast.Attribute):
            value = look_up(node.value)
            return None if value is None or isinstance(value, property | cached_property) else getattr(value, node.attr)
        if not isinstance(node, ast.Name) or node.id in own or node.id in dir(builtins):
            return None
        if node.id == "model" and "dtgpt.load(" in page:
            return LibraryModel
        if node.id in names or not node.id[0].isupper():
            return names.get(node.id)
        return next(getattr(one, node.id) for one in map(importlib.import_module, MODULES) if hasattr(one, node.id))

    for node in ast.walk(tree):
        called = look_up(node.func) if isinstance(node, ast.Call) else look_up(node)
        if isinstance(node, ast.Call) and getattr(called, "__module__", "").startswith("dtgpt"):
            given = [one for one in node.args if not (isinstance(one, ast.Constant) and one.value is ...)]
            if "self" in inspect.signature(called).parameters:
                given = [None, *given]
            if called is LibraryModel.generate:
                assert {one.arg for one in node.keywords} <= {*OPTIONS, *inspect.signature(called).parameters}
            inspect.signature(called).bind_partial(*given, **{one.arg: one for one in node.keywords if one.arg})
    if "def recipe(" in block:
        Path("block.py").write_text(block)
        call_recipe(load_module(Path("block.py")).recipe).validate()

"""Every option `--section.field` and every pytest command that the text of a page names exists."""

import re
import shlex
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import kinds as optimizers
from dtgpt.models.config import architectures
from dtgpt.util.seams import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("benchmarks/**/*.md"))]
SECTIONS = {f.name: [f.type] for f in fields(Recipe) if is_dataclass(f.type)}
SECTIONS |= {"model": map(load, architectures().values()), "optimizer": map(load, optimizers().values())}
OPTIONS = {f"{name}.{f.name}" for name, kinds in SECTIONS.items() for kind in kinds for f in fields(kind)}
OPTIONS |= Recipe.aliases.keys()
OPTIONS |= {"grpo.path"}  # of recipes/grpo_gsm8k.py
FILE = re.compile(r"tests[\w/]*(?:\.py)?")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_options_that_a_page_names_exist(page):
    named = set(re.findall(r"(?<![\w-])--([a-z]+\.[a-z]\w*)", page.read_text()))
    assert not named - OPTIONS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_pytest_command_chooses_tests(page):
    for command in re.findall(r"`((?:pytest |-m |tests/)[^`\n]+)`", page.read_text()):
        words = shlex.split(command)
        places = [ROOT / word for word in words if FILE.fullmatch(word)]
        assert all(place.exists() for place in places), command
        texts = [file.read_text() for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])]
        chosen = words[words.index("-k") + 1] if "-k" in words else ""
        for word in set(re.findall(r"\w+", chosen)) - {"or", "and", "not"}:
            assert not texts or any(word in text for text in texts), (command, word)

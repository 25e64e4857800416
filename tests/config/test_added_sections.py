"""A section and a command of `tests/support/example_sections.py`, and a field of `example_fields.py`."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace

import pytest

from dtgpt.posttrain.dpo.config import DpoConfig
from dtgpt.posttrain.lora.config import LoraConfig
from tests.promises.test_capabilities import PLAIN
from tests.support.core import ROOT

PROGRAM = """
import dataclasses, typing
from dtgpt.capabilities import CAPABILITIES
from dtgpt.cli import main
from dtgpt.util import seams

seams.use([*(module for module, _ in CAPABILITIES), "tests.support.example_sections", "tests.support.example_fields"])
from tests.support.example_sections import LimitsConfig
from dtgpt.config.recipe import Recipe
from plain import recipe

names = [each.name for each in dataclasses.fields(Recipe)]
assert names[names.index("data") - 1] == "limits", names  # behind the sections of all other capabilities
assert typing.get_type_hints(Recipe)["limits"] is LimitsConfig and recipe().limits == LimitsConfig()
limited = dataclasses.replace(recipe(), limits=LimitsConfig(lr=0.5))
assert dataclasses.asdict(limited)["limits"] == {"lr": 0.5} and limited.section(LimitsConfig).lr == 0.5
assert recipe().log.mood == "calm"

def call(*words):
    try:
        main(list(words))
    except SystemExit as end:
        print("exit", end.code, flush=True)

call("--help")
call("limits")
call("limit")
call("train", "plain.py", "--help-all")
call("train", "plain.py", "--limits.lr", "1e-4")
call("train", "plain.py", "--limits.lr", "0")
call("train", "plain.py", "--limits.lr", "0.25", "--log.mood", "loud")
call("train", "plain.py", "--log.mood", "sad")
call("train", "plain.py", "--resume", "auto", "--steps", "3")
"""


@pytest.mark.slow(3)
def test_a_file_adds_a_section_and_a_command(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    places = os.pathsep.join((str(ROOT), str(tmp_path)))
    environment = {**os.environ, "PYTHONPATH": places, "DTGPT_CACHE": str(tmp_path / "cache")}
    program = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    told = done.stdout.split("exit ")
    assert [part[0] for part in told[1:]] == list("002022020"), done.stdout + done.stderr
    assert told[0].endswith("  dtgpt limits\n      print the options that limit a recipe\n")
    assert "--limits.lr\n" in told[1] and "limits:\n  --limits.lr FLOAT|none" in told[3]
    assert "did you mean dtgpt limits?" in done.stderr
    assert "optimizer.lr=0.001 is above limits.lr=0.0001; lower it" in done.stderr
    assert "limits.lr=0.0 is out of range" in done.stderr
    assert "the learning rate stays below 0.25" in done.stdout + done.stderr
    assert "--log.mood TEXT" in told[3] and "log.mood='sad' is no mood; use calm or loud" in done.stderr
    saved = json.loads((tmp_path / "runs/plain-001/recipe.json").read_text())
    assert saved["limits"] == {"lr": 0.25} and saved["log"]["mood"] == "loud"


def test_sections_as_their_capability_has_them_are_off_and_those_of_a_recipe_are_asked(recipe):
    @dataclass(frozen=True, kw_only=True)
    class Preferring(DpoConfig):
        beta: float = 0.1

    @dataclass(frozen=True, kw_only=True)
    class Own(type(recipe)):
        dpo: DpoConfig = Preferring()
        lora: LoraConfig = field(default_factory=lambda: LoraConfig(rank=4))

    values = {name: value for name, value in vars(recipe).items() if name not in ("dpo", "lora")}
    own = Own(**values)
    assert recipe.sections == () and own.sections == (own.lora, own.dpo)
    assert replace(own, lora=LoraConfig()).sections == (own.dpo,)
    assert recipe.section(LoraConfig) == LoraConfig() and own.section(DpoConfig).beta == 0.1

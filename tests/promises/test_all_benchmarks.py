"""The command that measures all published figures: its parts can be run, and its rows are whole."""

import json
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
GPUS = (1, 2, 4, 8)


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """The scripts can be imported."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def commands() -> list[tuple[int, str, list[str]]]:
    """(GPUs, script, words) of all parts, each once."""
    sys.path.insert(0, str(BENCHMARKS))
    from parts import parts_of

    found = {}
    for gpus in GPUS:
        for part in parts_of(gpus):
            for script in part.scripts:
                words = script.words.format(n=gpus, four_n=4 * gpus)
                words = words.removeprefix("torchrun ")
                name, *rest = shlex.split(words)
                found[words] = gpus, name, rest
    return list(found.values())


STEPS = [each for each in commands() if each[1].endswith(("train_step.py", "scaling.py", "against_nanogpt.py"))]
STEPS += [each for each in commands() if each[1].endswith("against_transformers.py")]


@pytest.mark.parametrize("gpus, script, words", STEPS, ids=[" ".join([f"{n}:", *words]) for n, _, words in STEPS])
def test_the_recipe_of_each_measured_step_can_run(gpus, script, words):
    import against
    import train_step

    if "--against" in words and "train_step" in script:
        at = words.index("--against")
        _check(gpus, [*words[:at], *words[at + 2 :], *shlex.split(words[at + 1])], train_step.parse)
    parse = train_step.parse
    if "against_" in script:
        parser = against.make_parser("", "345m")
        parser.add_argument("--nanogpt")
        parser.add_argument("--peers", nargs="+")
        parse = parser.parse_known_args
    _check(gpus, words, parse)


def _check(gpus, words, parse):
    from train_step import make_recipe

    args, overrides = parse(words)
    scaling = {"--rounds", "--warm"}
    overrides = [w for i, w in enumerate(overrides) if w not in scaling and (i == 0 or overrides[i - 1] not in scaling)]
    for plan in args.plans:
        recipe, resolved = make_recipe(args, overrides, plan)
        assert resolved.world in (1, gpus), (plan, resolved.world)
        assert recipe.num_steps

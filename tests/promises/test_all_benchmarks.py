"""The command that measures all published figures: its parts can be run, its rows are whole, and what pages show is
what the rows say."""

import importlib
import json
import re
import shlex
import sys
import tomllib
from argparse import Namespace
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow(6)

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


def test_a_part_fits_ten_minutes_and_its_scripts_are_there():
    from parts import parts_of

    for gpus in GPUS:
        parts = parts_of(gpus)
        assert len({part.name for part in parts}) == len(parts)
        for part in parts:
            assert sum(script.seconds for script in part.scripts) <= 600, part.name
            assert len({script.label for script in part.scripts}) == len(part.scripts)
    for _, script, _ in commands():
        assert (ROOT / script).is_file(), script


GOOD = """
from figures import note
note("step", {"tokens/s": 1000.0, "ms": None}, rounds=[1.0, 2.0])
print("well")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return what measures parts of scripts that are made here, and returns the code and the rows."""
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    command = importlib.import_module("all")
    output = tmp_path / "rows.jsonl"

    def call(
        scripts: dict[str, str], limit_s: float = 100.0, seconds: int = 20, commit: str = "abc", **fields
    ) -> tuple[int, list[dict]]:
        from parts import Part, Script

        made = []
        for label, code in scripts.items():
            (tmp_path / f"{label}.py").write_text(code)
            made.append(Script(label, "", seconds, tiny=str(tmp_path / f"{label}.py"), **fields))
        args = Namespace(
            gpus=1, tiny=True, commit=commit, output=output, limit_s=limit_s, peers=tmp_path, log=tmp_path / "log"
        )
        code = command.measure(args, [Part("made", "", made)])
        return code, [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []

    return call


def test_a_script_that_fails_is_a_row_and_the_rest_goes_on(run, tmp_path):
    code, rows = run({"bad": "raise ValueError('it broke')", "good": GOOD})
    assert code == 1
    failed, step, done = rows
    assert failed["name"] == "bad" and failed["failed"] == "ValueError: it broke"
    assert step["name"] == "good: step" and step["figures"] == {"tokens/s": 1000.0} and step["rounds"] == [1.0, 2.0]
    for key in ("part", "script", "command", "commit", "sources", "gpus", "gpu", "torch", "date", "python"):
        assert key in step, key
    assert done["done"] and "well" in (tmp_path / "log").read_text()


def test_what_is_there_is_not_measured_again_and_what_failed_is(run, monkeypatch):
    run({"bad": "raise ValueError", "good": GOOD})
    _, rows = run({"bad": "raise ValueError", "good": GOOD})
    assert [row["name"] for row in rows] == ["bad", "good: step", "good", "bad"]
    _, rows = run({"good": GOOD}, commit="def")  # of the same sources
    assert len(rows) == 4
    monkeypatch.setattr(importlib.import_module("all"), "hash_sources", lambda: "other")
    _, rows = run({"good": GOOD}, commit="def")
    assert [row["name"] for row in rows][4:] == ["good: step", "good"]


@pytest.mark.parametrize(
    "file, other, same",
    [
        ("recipes/a.py", '"""200 tokens/s."""\n\nLR = 1\n', True),
        ("recipes/a.py", '"""100 tokens/s."""\n\nLR = 2\n', False),
        ("dtgpt/ops/a.cu", "// 2\n", False),
        ("docs/benchmarks.md", "2\n", True),
    ],
)
def test_sources_are_the_program_and_not_its_pages(tmp_path, monkeypatch, file, other, same):
    command = importlib.import_module("all")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    for name, text in {
        "recipes/a.py": '"""100 tokens/s."""\n\nLR = 1\n',
        "dtgpt/ops/a.cu": "// 1\n",
        "docs/benchmarks.md": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = command.hash_sources()
    (tmp_path / file).write_text(other)
    assert (command.hash_sources() == before) == same


def test_without_time_or_a_package_a_script_is_not_started(run, capsys):
    code, rows = run({"good": GOOD}, limit_s=10.0)
    assert (code, rows) == (0, []) and "no time was left for: made, good" in capsys.readouterr().out
    code, rows = run({"good": GOOD}, needs="no_such_package")
    assert code == 0 and rows[0]["skipped"] == "no_such_package is not installed"
    code, rows = run({"good": GOOD}, needs="no_such_package")  # asked for again, since it may be there by now
    assert len(rows) == 2


def test_a_script_is_ended_when_its_time_is_up(run, monkeypatch):
    monkeypatch.setattr(importlib.import_module("all"), "LEAST", 0.1)
    code, rows = run({"endless": "import time; time.sleep(60)"}, limit_s=2.0, seconds=0)
    assert code == 1 and re.fullmatch(r"ended after \d+ s", rows[0]["failed"])


def test_where_a_check_fails_nothing_is_measured(run):
    code, rows = run({"wrong": "raise ValueError", "good": GOOD}, is_check=True)
    assert code == 1 and [row["name"] for row in rows] == ["wrong"]


def test_pages_and_recipes_show_what_the_rows_say():
    from figure_tables import pages
    from figures import PUBLISHED, read_rows

    rows = read_rows(PUBLISHED)
    for page, write in pages().items():
        text = page.read_text()
        assert write(text, rows) == text, f"{page.name}: python benchmarks/all.py --tables writes it"


def test_the_picture_shows_what_the_rows_say():
    from figures import PUBLISHED, read_rows
    from picture import CURVES, digest_of, drawn, step_times

    times = step_times(read_rows(PUBLISHED))
    assert drawn() == digest_of(json.loads(CURVES.read_text()), times), "python benchmarks/all.py --tables draws it"


def test_every_figure_of_a_table_is_of_a_script_that_is_run():
    from figure_tables import PAGE, PLACE, TABLES
    from parts import parts_of

    specs = tomllib.loads(TABLES.read_text())
    assert {*re.findall("figures: (.*) -->", PAGE.read_text())} == {"machine", *specs["table"]}
    rows = [row for spec in specs["table"].values() for row in spec["rows"]]
    rows += [row for own in specs["recipe"].values() for row in own]
    scripts = {n: {f"{part.name}/{s.label}" for part in parts_of(n) for s in part.scripts} for n in GPUS}
    for source, text in rows:
        assert PLACE.search(text), text
        for named in {source, *(match[1] for match in PLACE.finditer(text) if match[1])}:
            gpus, _, script = named.rpartition("@")
            assert script in scripts[int(gpus or 1)], named


def test_every_row_of_a_table_finds_its_figures_where_its_script_was_measured():
    """A name that a script does not print any more would take a row off a page without a word."""
    from figure_tables import TABLES, Figures, rows_of
    from figures import PUBLISHED, read_rows

    specs, published = tomllib.loads(TABLES.read_text()), read_rows(PUBLISHED)
    figures = Figures(published)
    ended = {(row["gpus"], row["part"], row["script"]) for row in published if row.get("done")}
    rows = [row for spec in specs["table"].values() for row in rows_of(spec)]
    for source, text in [*rows, *(row for own in specs["recipe"].values() for row in own)]:
        gpus, _, place = source.rpartition("@")
        if (int(gpus or 1), *place.split("/", 1)) in ended:
            assert figures.filled(text, source) is not None, f"{source}: {text}"


def row(script: str, name: str, commit: str, **figures) -> dict:
    return {
        "part": "nanogpt", "script": script, "name": f"{script}: {name}", "figures": figures, "commit": commit,
        "gpus": 1, "gpu": "NVIDIA H200", "power limit W": 700.0, "torch": "2.11", "date": "2026-11-29",
    }  # fmt: skip


def test_a_table_has_the_last_figure_its_range_and_the_commits():
    from figure_tables import page_of

    page = "a\n<!-- figures: training -->\nold\n<!-- end of figures -->\nb"
    rows = [
        row("345m", "dtgpt", "old", **{"tokens/s": 1.0}),
        row("345m", "dtgpt", "new", **{"tokens/s": 212651.4, "MFU %": 52.34}),
        row("345m", "nanoGPT", "new", **{"tokens/s": 186130.0}) | {"differs": "weights in fp32"},
        row("345m", "dtgpt / nanoGPT", "other", ratio=1.1475, lowest=1.09, highest=1.2),
        {**row("124m", "dtgpt", "new", **{"tokens/s": 5.0}), "gpu": "another"},
        {"part": "nanogpt", "script": "345m", "name": "345m", "failed": "it broke", "gpus": 1},
    ]
    written = page_of(page, rows)
    assert written.startswith("a\n<!--") and written.endswith("-->\nb")
    lines = [line for line in written.splitlines() if line.startswith("| ")]
    assert lines[1:] == ["| 345M | 16 | 0 | 212,651 | 52.3 % | 186,130 | 1.147 (1.090 to 1.200) | new, other |"]
    assert "Not like for like: weights in fp32." in written
    assert "python benchmarks/all.py --gpus 1 --parts nanogpt\n" in written
    assert "Not measured yet." in page_of(page, rows[4:])


def test_a_recipe_says_its_speed_in_its_header():
    from figure_tables import recipe_of

    text = '"""Title.\n\nmeasured   old\n           and older\n\nRest.\n"""\n'
    written = recipe_of("gpt2_124m", text, [row("124m", "dtgpt", "new", **{"tokens/s": 584300.0})])
    said = "measured   584,300 tokens/s on one H200 with --global_batch_size 64 (docs/benchmarks.md)"
    assert written == f'"""Title.\n\n{said}\n\nRest.\n"""\n'
    assert recipe_of("gpt2_tiny", text, []) == text


def test_rows_of_another_machine_replace_older_ones(tmp_path, monkeypatch):
    import figure_tables

    published, new = tmp_path / "published.jsonl", tmp_path / "new.jsonl"
    published.write_text("".join(json.dumps(row("345m", name, "old", ms=1.0)) + "\n" for name in ("dtgpt", "nanoGPT")))
    failed = {"gpus": 1, "part": "nanogpt", "script": "345m", "name": "345m", "failed": "it broke", "commit": "new"}
    new.write_text(json.dumps(row("345m", "dtgpt", "new", ms=2.0)) + "\n" + json.dumps(failed) + "\n")
    monkeypatch.setattr(figure_tables, "pages", dict)
    monkeypatch.setattr("picture.redraw", lambda rows: None)
    assert figure_tables.write_all(published, [new]) == 0
    kept = [json.loads(line) for line in published.read_text().splitlines()]
    assert [(each["name"], each["commit"]) for each in kept] == [
        ("345m: dtgpt", "new"),
        ("345m: nanoGPT", "old"),
        ("345m", "new"),
    ]
    new.write_text(json.dumps({**failed, "failed": None, "done": True}) + "\n")  # it ended, and printed no nanoGPT
    assert figure_tables.write_all(published, [new]) == 0
    kept = [json.loads(line) for line in published.read_text().splitlines()]
    assert [each["name"] for each in kept] == ["345m: dtgpt", "345m"]


def test_chosen_cases_of_operations(monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace())
    monkeypatch.delitem(sys.modules, "cases", raising=False)
    from cases import Case, chosen

    monkeypatch.delitem(sys.modules, "cases", raising=False)
    cases = [
        Case("forward B1", {"ours": print, "PyTorch, cuDNN": print, "64x64": print}),
        Case("launches", {"64": print}),
    ]
    monkeypatch.setattr(sys, "argv", ["op.py", "--grouped", "--variants", "^(ours$|PyTorch)"])
    assert [(case.name, [*case.variants]) for case in chosen(cases)] == [("forward B1", ["ours", "PyTorch, cuDNN"])]

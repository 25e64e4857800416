"""What holds for the pages as a whole: their length, what stands on the site, and tables that code writes."""

import re
from pathlib import Path

import pytest

import dtgpt
from dtgpt.commands import train
from dtgpt.planning.command import command as plan
from tests.support import support_matrix

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
MOST_WORDS = 45_000
MOST_LINES = 165  # of a page, but that of benchmarks, whose tables a command writes
# Speed depends on machine and version. It stands in tables that are generated from measured rows, on docs/benchmarks.md
# and in the headers of recipes. What a command prints (in a fence) is no claim: `dtgpt plan` predicts milliseconds.
GENERATED = re.compile(r"(?ms)^```.*?^```|<!-- figures: .*?<!-- end of figures -->|^measured   .*?\n(?! {11})")
SPEED = re.compile(r"\d[\d.,]*k? ?tok(?:en)?s?/s\b|\d[\d.,]* ?ms\b(?!-)|\bMFU(?: of)? \d|\d ?% (?:of )?MFU")


def test_the_pages_can_be_read_in_a_day():
    words = [word for page in PAGES for word in page.read_text().split() if re.search(r"\w", word)]  # no bars of tables
    assert len(words) <= MOST_WORDS


def test_a_page_has_one_topic():
    lines = {page.name: len(page.read_text().splitlines()) for page in PAGES if page.name != "benchmarks.md"}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_readme_is_short_and_begins_with_two_commands():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    first, second = re.findall(r"^python -m pip install.*$", text, re.M)[:2]
    assert first.endswith("python recipes/gpt2_tiny.py") and "python -m pytest" in second


def test_speed_stands_in_generated_tables():
    headers = {file.name: file.read_text().split('"""')[1] for file in sorted((ROOT / "recipes").glob("*.py"))}
    texts = {page.name: page.read_text() for page in (*PAGES, ROOT / "README.md")} | headers
    found = {name: SPEED.findall(GENERATED.sub("", text)) for name, text in texts.items()}
    assert {name: figures for name, figures in found.items() if figures} == {}


def test_the_page_of_benchmarks_is_short_beside_its_tables():
    text = GENERATED.sub("", (DOCS / "benchmarks.md").read_text())
    assert len([line for line in text.splitlines() if line]) <= 150


def test_the_pattern_of_speed_finds_what_it_is_for():
    for figure in ("409k tokens/s", "5,150 tok/s", "148.7 ms", "12ms/step", "MFU 58.4%", "an MFU of 49 %", "49 % MFU"):
        assert SPEED.search(figure), figure
    for other in ("tokens/s", "--log.show time,ms,ppl", "MFU is known", "8,192 tokens", "26 GiB", "3 % in the median"):
        assert not SPEED.search(other), other


def test_every_page_stands_in_the_navigation_of_the_site():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r": ([\w/]+\.md)$", nav, re.M)
    outside = {"index.md", "CONTRIBUTING.md", "CHANGELOG.md", "measurements/README.md"}  # of .ci/site.py
    assert len(named) == len(set(named))
    assert set(named) - outside == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_the_changelog_begins_with_what_is_unreleased_and_with_this_version():
    first, second, *_ = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert (first, second) == ("Unreleased", dtgpt.__version__)


@pytest.mark.slow(2)
def test_the_tables_of_what_can_be_combined_are_those_of_the_checks():
    table = support_matrix.PAGE.read_text().partition(support_matrix.BEGIN)[2].partition(support_matrix.END)[0]
    assert table == support_matrix.table()  # python -m tests.support.support_matrix writes it


@pytest.mark.slow(3)
def test_the_model_of_the_page_on_extending_trains_and_can_be_cut(tmp_path, monkeypatch, text):
    code = re.search(r"```python\n(.*?)```", (DOCS / "extending.md").read_text(), re.S)[1]
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    words = f"mine.py --device cpu --steps 2 --data.path {text} --data.tokenizer bytes --model.vocab_size 257"
    assert train.command([*words.split(), "--log.sample_tokens", "4"]) == 0
    assert (tmp_path / "runs/mine-001/checkpoints/step_00000002").is_dir()
    assert plan(["mine.py", "--plan", "dp2_tp2_sp_pp2", "--micro_batch_size", "2"]) == 0

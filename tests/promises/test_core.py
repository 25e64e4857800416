"""The core may only come nearer to standing alone: no count of `tests/support/core.py` rises.

Where one falls, `python -m tests.support.core` writes the counts of today, which are committed with the change.
"""

import json

import pytest

from tests.support import core

RECORDED = json.loads(core.COUNTS.read_text())


@pytest.fixture(scope="module")
def sources():
    return core.measure_sources()


def assert_no_more(title: str, now) -> None:
    before = RECORDED[title]
    more = core.risen(before, now)
    assert core.size_of(now) <= core.size_of(before), (
        f"{title}: {core.size_of(before)} -> {core.size_of(now)}; what rose: {'; '.join(more)}"
    )


@pytest.mark.slow(3)
@pytest.mark.parametrize("title", [
    "statements of the core", "statements of the package", "imports from the core to outside",
    "identifiers of capabilities in the core", "circles of files", "fmt: skip",
])  # fmt: skip
def test_no_count_of_the_sources_rises(sources, title):
    assert_no_more(title, sources[title])


@pytest.mark.slow(12)
@pytest.mark.skipif(core.versions() != RECORDED["versions"], reason="counts are of other versions of Python and torch")
def test_no_count_of_what_runs_rises(tmp_path):
    for title, now in core.measure_runs(tmp_path).items():
        assert_no_more(title, now)


def test_what_rose_is_named():
    assert core.risen({"a": 1, "b": 2}, {"a": 3, "c": 1}) == ["a (1 -> 3)", "c (0 -> 1)"]
    assert core.risen(["x -> y"], ["x -> y", "x -> z"]) == ["x -> z (0 -> 1)"]


def test_modules_that_import_each_other_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"d"}, "f": set()}
    assert core.circles(graph) == [["a", "b", "c"], ["d", "e"]]

"""The record of refusals: sentences that are lost or changed are told, and lines that only refuse are counted."""

import ast

from dtgpt.config.recipe import Recipe
from tests.support.refusals import compare, listed_rules, normalised, refusing_lines

SOURCE = """
def check(x, y):
    if x > 1 and (
        y
    ):
        raise UserError(
            "x"
        )
    if x:
        y = 1
        raise UserError("y")
    raise ValueError
"""


def test_what_no_test_sees_any_more_is_told_with_what_is_near_to_it():
    before = {"a": ["x=1 is too small; use 2", "kept"], "b": ["all other words"], "gone": ["nobody sees it"]}
    after = {"a": ["x=1 is too small; use 3", "moved"], "b": ["kept"], "new": ["y"]}
    *lines, last = compare(before, after)
    assert lines == [
        "changed in a",
        "  - x=1 is too small; use 2",
        "  + x=1 is too small; use 3",
        "lost in b",
        "  - all other words",
    ]
    assert last == "2 sentences lost or changed; 1 tests of the first record are not in the second"


def test_folders_of_two_runs_are_the_same():
    one, other = (normalised(f"/tmp/pytest-of-root/pytest-{n}/popen-gw1/test_a{n}/runs: wrong") for n in (1, 22))
    assert one == other == "TMP/test_aN/runs: wrong"


def test_lines_that_only_refuse_are_those_of_raise_and_of_branches_with_nothing_else():
    assert refusing_lines(ast.parse(SOURCE)) == (3 + 3) + 1 + 1


def test_the_rules_of_a_recipe_are_listed_with_bounds_and_those_of_sections():
    found = {(one.field, one.kind): one for one in listed_rules(Recipe)}
    assert found["log.top_k", "bounds"].values == "0 or more and at most 2147483647"
    assert found["loss_scale.minimum", "rule"].values == "minimum > initial"
    assert "lora.rank" in {field for field, _ in found}

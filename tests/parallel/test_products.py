"""Searched matrix products under plans: each is searched once, the ranks agree, and the losses stay what they are."""

from collections import Counter
from dataclasses import replace

import pytest

from dtgpt.ops.matmul.choices import file_for, key_of, read_choices, write_choices
from dtgpt.ops.matmul.cublaslt import Algorithm
from dtgpt.parallel.products import first_of
from tests.support.bodies_matmul import steps_of
from tests.support.ranks import pool

STEPS = 3
LONG = [pytest.param(plan, marks=pytest.mark.long) for plan in ("dp2", "tp2", "pp2")]


def choices(folder):
    return read_choices(file_for(folder, "a CPU"), "a CPU")


def recipe_for(plan, recipe):
    model = replace(recipe.model, num_layers=4)
    return replace(recipe, plan=plan, model=model, micro_batch_size=1, global_batch_size=4)


@pytest.mark.parametrize("plan", ["zero3", "tp2_sp", "pp2_zbv", *LONG])
def test_ranks_search_each_product_once_and_use_the_same_algorithms(plan, recipe, tmp_path):
    recipe = recipe_for(plan, recipe)
    plain = pool().run(2, steps_of, recipe, STEPS, None)
    runs = pool().run(2, steps_of, recipe, STEPS, tmp_path)
    assert [losses for losses, _, _ in runs] == [losses for losses, _, _ in plain]
    searched = [problem for _, searches, _ in runs for problem in searches]
    used = set().union(*(calls.keys() for _, _, calls in runs))
    assert all(searches for _, searches, _ in runs)  # they share the work
    assert set(Counter(searched).values()) == {1} and {problem for problem, _ in used} == set(searched)
    assert len(used) == len(searched)  # no problem runs by two algorithms
    assert choices(tmp_path) == {key_of(problem): algorithm for problem, algorithm in used}
    assert all(count % (STEPS - 1) == 0 for _, _, calls in runs for count in calls.values())  # from step 2 on


@pytest.mark.long
def test_ranks_use_what_an_earlier_run_has_kept(recipe, tmp_path):
    recipe = recipe_for("zero3", recipe)
    first = pool().run(2, steps_of, recipe, STEPS, tmp_path)
    again = pool().run(2, steps_of, recipe, STEPS, tmp_path)
    assert any(searches for _, searches, _ in first) and not any(searches for _, searches, _ in again)
    assert [(losses, calls) for losses, _, calls in again] == [(losses, calls) for losses, _, calls in first]


def test_a_kept_algorithm_that_proves_wrong_is_searched_again(recipe, tmp_path):
    losses, _, calls = steps_of(recipe, 3, tmp_path)
    kept = choices(tmp_path)
    wrong, missing, right = sorted(kept)[:3]
    entries = {key: value for key, value in kept.items() if key != missing}
    file_for(tmp_path, "a CPU").unlink()
    write_choices(file_for(tmp_path, "a CPU"), "a CPU", entries | {wrong: Algorithm((9,) * 8, 0), right: None})
    again = steps_of(recipe, 3, tmp_path, refused=(9,))
    assert again[0] == losses and {key_of(problem) for problem in again[1]} == {wrong, missing}
    assert choices(tmp_path) == kept | {right: None}
    assert len(again[2]) == len(calls) - 1  # the one that is left to torch


def test_a_search_without_memory_leaves_a_product_to_torch_and_is_made_again(recipe, tmp_path):
    losses, searches, calls = steps_of(recipe, 3, tmp_path, full=True)
    assert searches and not calls and not choices(tmp_path)
    again = steps_of(recipe, 3, tmp_path)
    assert again[0] == losses and again[1] == searches and again[2]


def test_of_several_files_the_first_counts():
    one, two = Algorithm((1,) * 8, 0), Algorithm((2,) * 8, 0)
    assert first_of([{"a": one}, {"a": two, "b": None}, {"b": two, "c": two}]) == {"a": one, "b": None, "c": two}

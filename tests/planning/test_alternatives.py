"""Plans with alternatives: which one is chosen for a number of processes, and what is said of it."""

import itertools
from dataclasses import replace

import pytest

from dtgpt.config.plan import Plan, divisors
from dtgpt.config.plan_choice import parse_alternatives
from dtgpt.config.recipe import Recipe
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.util.errors import UserError

MODEL = GPT2Config(num_layers=4, hidden_size=48, num_heads=4, seq_length=16, vocab_size=257)
OWN = {"wide": Plan(tp=4, sequence_parallel=True)}


@pytest.fixture
def recipe(recipe) -> Recipe:
    return replace(recipe, model=MODEL, micro_batch_size=2, global_batch_size=24, plans=OWN)


@pytest.mark.parametrize(
    "plan, world, name, full",
    [
        ("tp4_zero1 | tp2_zero1 | tp2", 8, "tp4_zero1", "dp2_tp4_zero1"),
        ("tp4_zero1|tp2_zero1|tp2", 6, "tp2_zero1", "dp3_tp2_zero1"),
        ("tp4_zero1 | tp2", 7, "tp2", "dp3_tp2"),  # 6 of 7: tp4 fits only 4
        ("dp8 | dp", 8, "dp", "dp6"),  # 12 micro-batches cannot be shared among 8
        ("dp4 | dp2 | single", 3, "dp2", "dp2"),
        ("single | dp", 5, "dp", "dp4"),
        ("wide | tp2", 5, "wide", "tp4_sp"),
        ("tp3 | dp", 3, "dp", "dp3"),  # tp=3 does not divide the heads
        ("pp4 | pp2", 16, "pp4", "dp3_pp4"),  # 4 replicas would leave the schedule too few micro-batches
        ("zero3 | dp", 4096, "zero3", "dp12_zero3"),
    ],
)
def test_the_first_of_those_that_fit_the_most_processes_is_chosen(recipe, plan, world, name, full):
    choice = replace(recipe, plan=plan).choose_plan(world)
    assert (choice.name, choice.plan.name, choice.waiting) == (name, full, world - choice.plan.world)


@pytest.mark.slow(1)
def test_every_choice_is_the_one_that_trying_all_counts_finds(recipe):
    names = ["dp", "dp4", "tp2", "tp4_zero1", "pp2", "pp4", "wide", "zero2", "tp2_pp2_zbv", "single", "tp3"]
    for pair, world in itertools.product(itertools.permutations(names, 2), (1, 2, 3, 5, 7, 8, 13, 24)):
        found = tried(recipe, pair, world)
        changed = replace(recipe, plan=" | ".join(pair))
        if found is None:
            with pytest.raises(UserError, match="no alternative"):
                changed.choose_plan(world)
        else:
            choice = changed.choose_plan(world)
            assert (choice.name, choice.plan) == found, (pair, world)


def tried(recipe, names, world):
    for count, name in itertools.product(range(world, 0, -1), names):
        try:
            return name, replace(recipe, plan=name).plan_for(count)
        except UserError:
            pass
    return None


def test_the_sizes_of_a_ramp_must_be_divided_too(recipe):
    ramped = replace(recipe, plan="dp12 | dp4 | dp", rampup_batch_size="8 8 100")
    assert ramped.choose_plan(12).name == "dp4"
    assert replace(ramped, rampup_batch_size=None).choose_plan(12).name == "dp12"


def test_a_plan_without_alternatives_must_fit_all_processes(recipe):
    with pytest.raises(UserError, match="start 4 "):
        replace(recipe, plan="dp4").choose_plan(5)
    assert replace(recipe, plan="dp4").choose_plan(4).describe() == []


def test_the_log_names_the_choice_and_those_that_wait(recipe):
    choice = replace(recipe, plan="tp4_zero1 | tp2").choose_plan(7)
    assert choice.describe() == [
        "plan: tp2 (2nd of 2) on 6 processes: dp3_tp2",
        "1 of 7 processes waits: no alternative fits more than 6 of them",
    ]
    assert choice.explain() == ["tp4_zero1 fits 4 of 7 processes"]


def test_each_alternative_that_is_not_chosen_has_its_reason(recipe):
    choice = replace(recipe, plan="tp3 | tp8 | dp | dp5_tp2 | tp4 | dp1").choose_plan(7, started=False)
    first, second, *rest = choice.explain()
    assert (choice.name, choice.plan.world) == ("dp", 6)
    assert first.startswith("tp3 fits none of 7 processes: model.num_heads=4 cannot be split over tp=3")
    assert second.startswith("tp8 fits none of 7 processes: the plan tp8 needs tp=8 ") and "use --world 8" in second
    assert rest[0].startswith("dp5_tp2 fits none of 7 processes: ") and rest[1:] == [
        "tp4 fits 4 of 7 processes", "dp1 fits 1 of 7 processes"
    ]  # fmt: skip
    batch = replace(recipe, plan="tp2 | dp4", global_batch_size=8).choose_plan(6)
    assert batch.name == "tp2" and batch.plan.world == 4
    assert batch.explain() == ["dp4 fits 4 of 6 processes, too, but comes after tp2"]
    batch = replace(recipe, plan="tp2 | dp", global_batch_size=10).choose_plan(6)
    assert batch.explain()[0].startswith("tp2 fits 2 of 6 processes: global_batch_size=10 cannot be split")


def test_where_nothing_fits_one_sentence_gives_the_reason_of_the_first(recipe):
    with pytest.raises(UserError, match=r"'tp4 \| tp2' fits 1 process or fewer; tp4: the plan tp4 .* start 4 "):
        replace(recipe, plan="tp4 | tp2").choose_plan(1)
    with pytest.raises(UserError, match=r"tp3: model\.num_heads=4 cannot be split over tp=3"):
        replace(recipe, plan="tp3 | tp48").choose_plan(50)


@pytest.mark.parametrize(
    "text, words",
    [
        ("tp2 |", "no plan on one side"),
        ("|", "no plan on one side"),
        ("tp2 || dp", "no plan on one side"),
        ("tp2 | zreo1", "'zreo1' is not part of a plan; did you mean zero1"),
        ("tp2 | dp | tp2", r"the same plan twice \(tp2\); leave one"),
        ("single | dp1", r"the same plan twice \(single and dp1\); leave one"),
        ("tp2_sp|sp_tp2", r"the same plan twice \(tp2_sp and sp_tp2\); leave one"),
        (" | ".join(f"dp{n}" for n in range(1, 200)), "has 199 alternatives; give 100 or fewer"),
    ],
)
def test_alternatives_that_cannot_be_read_are_refused_in_one_sentence(text, words):
    with pytest.raises(UserError, match=rf"^plan='.*{words}") as refusal:
        parse_alternatives(text, OWN)
    assert len(str(refusal.value)) < 300


def test_names_may_be_written_without_spaces_and_across_lines():
    assert list(parse_alternatives("tp4|tp2 |\n  dp")) == ["tp4", "tp2", "dp"]


def test_divisors_come_in_order():
    assert divisors(1) == [1] and divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36] and divisors(7) == [1, 7]

"""What `dtgpt compare` and random cases say of how far a plan is from one process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtgpt.compare import compare
from dtgpt.compare.command import in_place_of
from dtgpt.compare.finding import Located, finding_of
from dtgpt.compare.record import Record, rounding_of
from dtgpt.compare.shared_state import Apart
from dtgpt.compare.verdict import ROUNDINGS, Limits, difference, limits_between, limits_of, problems
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.util.errors import UserError

LIMITS = Limits(first_loss=1e-6, first_gradient=1e-5, loss=1e-4, tensors=1e-3)


def run(steps: int = 4, **changes) -> Record:
    """A run of equal steps."""
    tensors = {f"{kind}/a": torch.ones(3) for kind in ("first gradient", "last gradient", "weight")}
    made = Record(
        dtype="torch.bfloat16", rounding="sums", losses=[5.0] * steps, norms=[2.0] * steps, rates=[1e-3] * steps,
        scales=[], memory=[0.0], planned=None, initial="same", tensors=tensors,
    )  # fmt: skip
    return replace(made, **changes)


def with_tensor(key: str, value: float) -> Record:
    return run(tensors={**run().tensors, key: torch.full((3,), value)})


def said(ours: Record, *rounded: Record) -> list[str]:
    return problems(difference(ours, run()), LIMITS, [difference(other, run()) for other in rounded])


def test_equal_runs_have_no_problem():
    assert said(run()) == []


def test_the_step_at_which_each_curve_parts_is_named_the_earliest_first():
    ours = run(losses=[5.0, 5.0, 5.1, 5.2], norms=[2.0, 2.1, 2.0, 2.0], rates=[1e-3, 1e-3, 1e-3, 1.3e-4])
    assert said(ours) == [
        "the gradient norm diverges at step 2, by 5.0e-02",
        "the loss diverges at step 3, by 2.0e-02",
        "the learning rate of step 4 is 0.00013, that of one process 0.001",
    ]


def test_the_first_loss_gradient_and_norm_are_judged_more_sharply_than_later_ones():
    assert said(run(losses=[5.0, 5.0002, 5.0, 5.0])) == []
    assert said(run(losses=[5.0002, 5.0, 5.0, 5.0])) == ["the loss diverges at step 1, by 4.0e-05"]
    assert said(run(norms=[2.0, 2.001, 2.0, 2.0])) == []
    assert said(run(norms=[2.001, 2.0, 2.0, 2.0])) == ["the gradient norm diverges at step 1, by 5.0e-04"]
    assert said(with_tensor("last gradient/a", 1.0005)) == []
    assert said(with_tensor("first gradient/a", 1.0005)) == ["first gradient of a differs by 5.0e-04"]


def test_what_rounding_did_to_one_process_explains_as_much_of_a_plan():
    ours, moved = with_tensor("last gradient/a", 1.02), with_tensor("last gradient/a", 0.995)
    assert said(ours) == ["last gradient of a differs by 2.0e-02"]
    assert said(ours, moved) == [] and said(with_tensor("last gradient/a", 1.03), moved) != []
    ours, moved = run(losses=[5.0, 5.0, 5.0, 5.01]), run(losses=[5.0, 5.003, 5.0, 5.0])
    assert said(ours, moved) == []  # at an earlier step, too
    moved = run(losses=[5.0, 5.0, 5.0, 5.003])
    assert said(run(losses=[5.0, 5.01, 5.0, 5.0]), moved) == ["the loss diverges at step 2, by 2.0e-03"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_a_problem(value):
    assert said(run(losses=[5.0, value, 5.0, 5.0])) and said(with_tensor("weight/a", value))


def test_learning_rates_and_loss_scales_are_equal_bit_for_bit():
    assert said(run(rates=[1e-3, 1e-3 + 1e-18, 1e-3, 1e-3 * (1 + 1e-7)])) != []
    ours, theirs = run(scales=[4.0, 4.0, 2.0, 2.0]), run(scales=[4.0, 2.0, 2.0, 2.0])
    assert problems(difference(ours, theirs), LIMITS) == ["the loss scale of step 2 is 4, that of one process 2"]


def test_limits_depend_on_how_a_plan_rounds(recipe):
    settings = {
        name: recipe.settings(parse_plan(name).for_world(parse_plan(name).world), torch.device("cpu"))
        for name in ("single", "dp2_zero1", "dp2_zero3", "dp2", "pp2", "dp2_pp2_zero1", "tp2", "tp2_sp", "pp2_zbv")
    }
    kinds = {name: rounding_of(each) for name, each in settings.items()}
    assert [name for name, kind in kinds.items() if kind == "order"] == ["single", "dp2_zero1", "dp2_zero3"]
    assert [name for name, kind in kinds.items() if kind == "sums"] == ["dp2", "pp2", "dp2_pp2_zero1"]
    firsts = [limits_of(run(rounding=kind)).first_gradient for kind in ("order", "sums", "products")]
    assert firsts == sorted(firsts) and firsts[0] == 1e-5 and firsts[2] < 0.02
    assert limits_of(run(dtype="torch.float32", rounding="products")).first_gradient == 1e-5
    assert ROUNDINGS * 2 * limits_of(run(dtype="torch.float16")).tensors < 2e-2


def test_a_run_in_another_precision_is_held_to_the_limits_of_the_coarser():
    exact, narrow, narrowest = run(dtype="torch.float32"), run(), run(fp8=True)
    limits = limits_between(narrow, exact)
    assert limits == limits_between(exact, narrow) and limits.first_gradient == 4 * narrow.eps
    assert limits_between(narrowest, narrow).first_gradient > limits.first_gradient
    assert limits_between(narrow, run()) == limits_of(narrow)
    moved = difference(with_tensor("weight/a", 2.0), exact)
    assert problems(moved, limits) == [] and problems(moved, limits_of(narrow)) != []
    assert problems(difference(with_tensor("first gradient/a", 1.1), exact), limits) != []


def test_a_long_comparison_is_held_to_what_rounding_does_to_one_process(recipe, monkeypatch, capsys):
    """A plan is further from one process than its limits, but no further than one that only rounds otherwise."""
    last = {"single": 1.0, "dp2": 1.3}
    rounding = [None, 1.1, 1.0, 1.2]  # what runs are, whose weights are moved

    def run_plan(pool, path, side, steps, tracing, patience):
        return replace(
            run(1), tensors=with_tensor("last gradient/a", rounding[tracing.moved] or last[side.name]).tensors
        )

    monkeypatch.setattr(compare, "run_plan", run_plan)
    monkeypatch.setattr(compare, "Reference", lambda *given: None)
    monkeypatch.setattr(compare, "problem_of_reference", lambda *given: None)
    monkeypatch.setattr(compare, "locate", lambda *given: Located())
    assert compare.compare(recipe, Path("recipe.py"), ["dp2"], 1, None, [])["status"] == 0
    out = capsys.readouterr().out
    assert "\nmoved " in out and "moved 2" not in out
    last["dp2"] = 1.6
    assert compare.compare(recipe, Path("recipe.py"), ["dp2"], 1, None, [])["status"] == 0
    assert "\nmoved 3" in capsys.readouterr().out  # the third shows more rounding than the others
    last["dp2"] = 1.9
    assert compare.compare(recipe, Path("recipe.py"), ["dp2"], 1, None, [])["status"] == 1
    assert "WRONG: last gradient of a differs by 9.0e-01" in capsys.readouterr().out
    assert compare.compare(recipe, Path("recipe.py"), ["dp2"], 1, 0.95, [])["status"] == 0
    assert "moved" not in capsys.readouterr().out  # nothing is measured where a tolerance is given


def test_a_comparison_of_steps_that_fp16_skips_is_refused(recipe: Recipe, monkeypatch):
    def run_plan(pool, path, side, steps, tracing, patience):
        return run(norms=[float("inf")] * 4)

    monkeypatch.setattr(compare, "run_plan", run_plan)
    with pytest.raises(UserError, match=r"plan single skipped all steps.*--loss_scale.initial 4096"):
        compare.compare(recipe, Path("recipe.py"), ["dp2"], 4, None, [])


def test_a_reference_that_cannot_be_one_ends_the_comparison(recipe, monkeypatch):
    begun = []
    found = finding_of(0.4, "fault", kind="activation", module="head", tensor="head input 0", rank=0, micro_batch=0)
    monkeypatch.setattr(compare, "run_plan", lambda pool, path, side, *given: begun.append(side.name) or run(1))
    monkeypatch.setattr(compare, "Reference", lambda *given: None)
    monkeypatch.setattr(compare, "problem_of_reference", lambda *given: (found, "it draws lots"))
    result = compare.compare(recipe, Path("recipe.py"), ["dp2"], 1, None, [])
    assert begun == ["single"] and result["status"] == 1 and result["runs"] == {}
    assert result["reference"]["problems"] == ["it draws lots"] and result["reference"]["verdict"] == "fault"
    assert result["reference"]["first_fault"]["module"] == "head"


def test_a_run_on_other_tokens_has_no_other_verdict(recipe, monkeypatch):
    tokens = {"single": [["0 a", "1 b"], ["2 c", "3 d"]], "dp2": [["0 a", "1 b"], ["2 c", "3 e"]]}

    def run_plan(pool, path, side, steps, tracing, patience):
        assert not tracing.moved
        return replace(run(2, losses=[5.0, 6.0] if side.name == "dp2" else [5.0, 5.0]), tokens=tokens[side.name])

    monkeypatch.setattr(compare, "run_plan", run_plan)
    monkeypatch.setattr(compare, "Reference", lambda *given: None)
    monkeypatch.setattr(compare, "problem_of_reference", lambda *given: None)
    monkeypatch.setattr(compare, "locate", lambda *given: Located())
    result = compare.compare(recipe, Path("recipe.py"), ["dp2"], 2, None, [])
    (problem,) = result["runs"]["dp2"]["problems"]
    assert problem.startswith("other tokens than one process has: 1 sample of step 2, such as 3;")


def test_state_is_judged_by_step_before_the_weights_that_it_moves():
    apart = [
        Apart(3, "weight", "head.a", 0.2, None), Apart(3, "exp_avg", "head.a", 0.1, 1),
        Apart(3, "exp_avg", "head.b", 0.3, 0), Apart(4, "exp_avg", "head.b", 0.4, None),
    ]  # fmt: skip
    ours, moved = run(apart=apart), run(apart=[each._replace(difference=0.08) for each in apart])
    assert said(ours) == [
        "exp_avg of head.b on rank 0 after step 3 differs by 3.0e-01",
        "exp_avg of head.b after step 4 differs by 4.0e-01",
    ]
    assert said(ours, moved) == ["exp_avg of head.b after step 4 differs by 4.0e-01"]
    assert said(ours, run()) == ["exp_avg of head.b after step 4 differs by 4.0e-01"]  # older code kept none
    assert said(run(held_out=5.0)) == []  # likewise
    found = difference(run(held_out=5.005), run(held_out=5.0))
    assert problems(found, LIMITS) == ["the validation loss differs by 1.0e-03"]


def test_a_setting_takes_the_place_of_the_option_of_all_runs():
    given = {"precision": ["bf16"], "log.show": ["norm"], "optimizer.lr": ["1e-3"]}
    assert in_place_of(given, ["--precision", "fp32", "--log.show=lr"]) == [
        *("--optimizer.lr=1e-3", "--precision", "fp32", "--log.show=lr")
    ]

"""Rules as data: conditions, values in sentences, and that every sentence of a recipe's rules names what there is."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import pytest

from dtgpt.util.errors import UserError, shown
from dtgpt.util.field_types import Bounds, check_fields
from dtgpt.util.rules import Changed, Given, Is, Missing, Other, Rule, Rules, broken, check_rules
from tests.support.refusals import listed_rules


def doubled(run: "Run") -> str:
    return str(2 * run.steps)


@dataclass(frozen=True, kw_only=True)
class Loss:
    name: str = "plain"
    smoothing: float = 0.0
    rules: ClassVar[Rules] = (
        Rule(
            "loss.{field}={value} has no effect with loss.name={name}; leave it at {default}",
            Changed("smoothing"),
            Is("name", "==", "plain"),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    steps: Annotated[int, "number of steps", Bounds(1)] = 10
    warmup: int = 0
    prompt: str = ""
    file: str = ""
    loss: Loss = field(default_factory=Loss)
    rules: ClassVar[Rules] = (
        Rule(
            "warmup={warmup} is above steps={steps}; use --steps {remedy}",
            Is("warmup", ">", Other("steps")),
            remedy=doubled,
        ),
        Rule("{option}={value!r} and file={file} exclude each other; leave one out", Given("prompt"), Given("file")),
        Rule("file={file} needs steps", Given("file"), Is("steps", "in", (1, 2))),
        Rule("loss.smoothing={loss.smoothing:.2f} needs a prompt", Given("loss.smoothing"), Missing("prompt")),
    )
    plan_rules: ClassVar[Rules] = (
        Rule("steps={steps} are cut by tp={plan.tp}", Is("steps", "is no multiple of", Other("plan.tp"))),
        Rule("{field}={value} is not {default}", Changed("steps", "warmup", "file"), Is("plan.tp", ">=", 4)),
        Rule("the prompt is long", Given("prompt_is_long")),
    )

    @property
    def prompt_is_long(self) -> bool:
        return len(self.prompt) > 2


@dataclass(frozen=True)
class Degrees:
    tp: int


@pytest.mark.parametrize(("run", "sentence"), [
    (Run(warmup=11), "warmup=11 is above steps=10; use --steps 20"),
    (Run(prompt="a" * 200, file="b"), f"prompt={shown('a' * 200)} and file=b exclude each other; leave one out"),
    (Run(steps=2, file="b"), "file=b needs steps"),
    (Run(loss=Loss(name="other", smoothing=0.125)), "loss.smoothing=0.12 needs a prompt"),
    (Run(loss=Loss(smoothing=0.5)), "loss.smoothing=0.5 has no effect with loss.name=plain; leave it at 0.0"),
    (Run(steps=0, warmup=11), "steps=0 is out of range; use 1 or more"),
])  # fmt: skip
def test_a_broken_rule_is_one_sentence_with_the_values(run, sentence):
    with pytest.raises(UserError) as refused:
        check_fields(run)
    assert str(refused.value) == sentence


def test_values_that_keep_all_rules_pass():
    check_fields(Run())
    check_fields(Run(warmup=10, prompt="x", loss=Loss(name="other", smoothing=0.1)))
    check_rules(Run.plan_rules, Run(), plan=Degrees(5 - 3))


def test_other_objects_are_handed_over_by_name_and_each_field_that_fits_is_told():
    found = list(broken(Run.plan_rules, Run(warmup=3, prompt="abc", file="d"), plan=Degrees(4)))
    assert found == ["steps=10 are cut by tp=4", "warmup=3 is not 0", "file=d is not ", "the prompt is long"]


def test_a_mapping_has_rules_too_and_lacks_what_it_does_not_have():
    rules = (Rule("{file} has act={act}", Is("act", "not in", (None, "gelu"))),)
    check_rules(rules, {"act": "gelu"}, file="config.json")
    check_rules(rules, {}, file="config.json")
    with pytest.raises(UserError, match=r"^config.json has act=relu$"):
        check_rules(rules, {"act": "relu"}, file="config.json")


def test_the_list_of_rules_has_types_bounds_conditions_and_sections():
    found = {(one.field, one.kind, one.values) for one in listed_rules(Run)}
    assert ("steps", "bounds", "1 or more") in found
    assert ("warmup", "rule", "warmup > steps") in found
    assert ("loss.smoothing", "rule", "smoothing is changed and name == 'plain'") in found
    assert ("steps, warmup, file", "rule", "steps or warmup or file is changed and plan.tp >= 4") in found
    assert ("prompt_is_long", "rule", "prompt_is_long is given") in found

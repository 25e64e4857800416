"""Tables of rules: each sentence can be written, with the values of any recipe."""

import sys
from dataclasses import replace
from operator import attrgetter

import pytest

from dtgpt.config.recipe_rules import NOTES, RULES
from dtgpt.config.sections import Section
from dtgpt.util import seams
from dtgpt.util.rules import Condition, Rule, Values, broken


def added(seam: str) -> list:
    """Return the tables that capabilities add, whatever a recipe has on."""
    parts = [part for each in seams.capabilities() for part in each.parts[seam]]
    return [seams.load(getattr(part, "part", part)) for part in parts]


SECTIONS = {name: seams.load(part) for name, part in seams.added("sections").items()}


class Always(Condition):
    """Holds, but looks the names up."""

    def fits(self, values: Values, name: str) -> bool:
        values.look(name)
        return True


def sentences(rules, config, **others):
    """Return the sentence of each rule, whether it is broken or not."""
    told = [
        Rule(rule.sentence, *(Always(*each.names) for each in rule.conditions), remedy=rule.remedy) for rule in rules
    ]
    return list(broken(told, config, **others))


@pytest.fixture
def full(recipe):
    return replace(recipe, seq_length=8)


def test_every_sentence_of_a_recipe_can_be_written(full):
    plan, choice = full.plan_for(1), full.planned_choice(1)
    told = [
        *sentences(RULES, full),
        *(told for rules in added("plan_rules") for told in sentences(rules, full, plan=plan)),
        *(told for rules in added("settings_rules") for told in sentences(rules, full.planned(1))),
        *sentences(NOTES, full, choice=choice, device="cpu", length=10),
    ]
    assert (
        len(added("plan_rules")) == 5
        and len(told) > 20
        and "global_batch_size=8 is not a multiple of micro_batch_size=4; " in "".join(told)
    )
    assert not any("{" in sentence for sentence in told)


@pytest.mark.parametrize("name", ["optimizer", "loss_scale"])
def test_every_sentence_of_a_section_can_be_written(full, name):
    section = getattr(full, name)
    assert len(sentences(section.rules, section)) == len(section.rules) > 0


@pytest.mark.parametrize("name", SECTIONS)
def test_every_sentence_of_a_capability_can_be_written(full, name):
    kind = SECTIONS[name]
    assert issubclass(kind, Section)
    others = [*added("plan_rules"), *added("settings_rules")]  # those of another object: see above
    for table in vars(sys.modules[kind.__module__]).values():
        if isinstance(table, tuple) and table and isinstance(table[0], Rule) and table not in others:
            sentences(table, full)
    sentences(kind.recipe_rules, full)
    sentences(kind.plan_rules, attrgetter(name)(full), plan=full.plan_for(1))
    sentences(kind.new_weights_rules, attrgetter(name)(full))

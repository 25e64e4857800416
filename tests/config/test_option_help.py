"""Fields of recipes as options: their help, and their values as words."""

import json
from dataclasses import asdict
from operator import attrgetter

from dtgpt.commands.command import help_text
from dtgpt.config.overrides import apply_overrides, leaves
from dtgpt.util.shared.option_words import value_text


def test_every_field_can_be_overridden_and_shows_in_help(recipe):
    text = " ".join(help_text("doc", "torchrun x.py", recipe).split())
    names = {name for name, *_ in leaves(recipe)}
    assert len(names) > 40 and len(json.dumps(asdict(recipe))) > 500
    for name, type_, description, value in leaves(recipe):
        assert f"--{name} " in text and description in text
        if value is not None:
            assert attrgetter(name)(apply_overrides(recipe, [f"--{name}", value_text(value)])) == value, (name, type_)

"""The optimizers that `optimizer.kind` names."""

from collections.abc import Sequence
from dataclasses import fields, replace

from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import OptimizerConfig
from dtgpt.optim.muon import MuonConfig
from dtgpt.optim.normuon import NorMuonConfig
from dtgpt.util.errors import UserError, shown_name

KINDS = {config.kind: config for config in (OptimizerConfig, MuonConfig, NorMuonConfig)}


def named_kind(words: Sequence[str]) -> str | None:
    """Return the value of the last `--optimizer.kind` among the words of a command line; None without one."""
    found = None
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name == "--optimizer.kind":
            found = value if equals else following
    return found


def of_kind(recipe: Recipe, kind: str | None) -> Recipe:
    """Return the recipe with the optimizer of this kind, and the values of all fields that both kinds have. Raise
    UserError where there is none."""
    if kind is None or kind == recipe.optimizer.kind:
        return recipe
    if kind not in KINDS:
        raise UserError(f"optimizer.kind={shown_name(kind)} is not an optimizer; use {', '.join(KINDS)}")
    known = {f.name for f in fields(KINDS[kind])} - {"kind"}
    values = {f.name: getattr(recipe.optimizer, f.name) for f in fields(recipe.optimizer) if f.name in known}
    return replace(recipe, optimizer=KINDS[kind](**values))

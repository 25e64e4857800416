"""The optimizers that `optimizer.kind` names: AdamW, and those of capabilities. Only that of a run is imported."""

from collections.abc import Sequence
from dataclasses import fields, replace

from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import OptimizerConfig
from dtgpt.util import seams
from dtgpt.util.errors import UserError, shown_name


def kinds() -> dict[str, str]:
    """Return 'module:class' of the config of every optimizer, by kind."""
    return {OptimizerConfig.kind: "dtgpt.config.sections:OptimizerConfig", **seams.added("optimizers")}


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
    if kind not in (known_kinds := kinds()):
        raise UserError(f"optimizer.kind={shown_name(kind)} is not an optimizer; use {', '.join(known_kinds)}")
    config = seams.load(known_kinds[kind])
    known = {f.name for f in fields(config)} - {"kind"}
    values = {f.name: getattr(recipe.optimizer, f.name) for f in fields(recipe.optimizer) if f.name in known}
    return replace(recipe, optimizer=config(**values))

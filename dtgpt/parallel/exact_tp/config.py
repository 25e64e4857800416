"""The number of pieces, and what cannot be computed in them."""

from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, ClassVar

from dtgpt.config.sections import Section
from dtgpt.models.inventory import inventory
from dtgpt.models.roles import Role, role_of
from dtgpt.parallel.exact_tp import NAME
from dtgpt.util import seams
from dtgpt.util.field_types import Bounds
from dtgpt.util.rules import Changed, Condition, Given, Is, Rule, Rules, Values
from dtgpt.util.seams import OFF

FAST = "--reduce exact or fast"


class NoPowerOfTwo(Condition):
    """A number is no power of two."""

    def fits(self, values: Values, name: str) -> bool:
        number = values.look(name)
        return number & (number - 1) != 0


@dataclass(frozen=True, kw_only=True)
class PiecesConfig(Section):
    """Sums that tensor parallelism cuts, in the same pieces under every plan."""

    fixed: ClassVar[bool] = True
    recipe_rules: ClassVar[Rules] = (
        Rule(
            f"{NAME}.pieces={{{NAME}.pieces}} has no effect with reduce={{reduce}}; use --reduce {NAME}",
            Changed(f"{NAME}.pieces"),
            Is("reduce", "!=", NAME),
        ),
        Rule(f"{NAME}.pieces={{{NAME}.pieces}} is no power of two; use 2, 4, 8 or 16", NoPowerOfTwo(f"{NAME}.pieces")),
    )

    pieces: Annotated[
        int, f"with --reduce {NAME}: pieces of each sum that tensor parallelism may cut; tp divides it", Bounds(2, 64)
    ] = 8


# What pieces are known of: every module with parameters has one of these roles, or one that a capability adds.
NORMS = Role.NORM, Role.HEAD_NORM
ROLES = (Role.VOCABULARY, Role.POSITIONS, *NORMS, Role.QKV, Role.COLUMN, Role.ROW, Role.OUTPUT)
WHOLE = (*NORMS, Role.ROW)  # of these, gradients of what all ranks hold are whole on each, and not addends


def pieces_of_size(size: int, most: int) -> int:
    """Return the pieces that a dimension is divided into: the largest power of two that divides it, or `most`. What tp
    divides has as many pieces as there are ranks, or more."""
    return min(most, size & -size)


def values_of(given: Any) -> PiecesConfig:
    """Return the section of a recipe, or of settings."""
    return given.section(PiecesConfig)


def unknown_role(recipe: Any) -> str:
    """Return a module with parameters whose sums have no pieces; none: empty."""
    known = {*ROLES, *(role for roles in seams.listed("roles_in_pieces") for role in roles)}
    for parameter in inventory(recipe.model).parameters():
        module, _, kind = parameter.name.rpartition(".")
        role = role_of(module, recipe.model.roles)
        if role not in known or (role is Role.OUTPUT and kind == "bias"):
            return parameter.name
    return ""


class HasOtherModules(Condition):
    """A recipe's model has modules of other roles."""

    def fits(self, values: Values, name: str) -> bool:
        return bool(unknown_role(values.config))


def other_objective(recipe: Any) -> str:
    """Return the option that turns on an objective of a capability; none: empty."""
    return next((name for name in seams.added("objectives") if attrgetter(name)(recipe) not in OFF), "")


class HasOtherObjective(Condition):
    """A recipe has another objective than language modelling."""

    def fits(self, values: Values, name: str) -> bool:
        return bool(other_objective(values.config))


class HasPositions(Condition):
    """A recipe's model has a table of positions."""

    def fits(self, values: Values, name: str) -> bool:
        return Role.POSITIONS in values.config.model.roles.values()


class TooManyRanks(Condition):
    """The tensor-parallel ranks of a plan do not divide the pieces."""

    def fits(self, values: Values, name: str) -> bool:
        return bool(values_of(values.config).pieces % values.look("plan.tp"))


PLAN_RULES: Rules = (  # of a recipe under a `plan`
    Rule(
        f"reduce={NAME}, but tp={{plan.tp}} does not divide {NAME}.pieces={{{NAME}.pieces}}, a power of two; use a tp "
        f"that does, more --{NAME}.pieces, or {FAST}",
        TooManyRanks("plan"),
    ),
    Rule(
        f"reduce={NAME}, but the sums of {{remedy}} are not computed in pieces; use {FAST}",
        HasOtherModules("model"),
        remedy=unknown_role,
    ),
    Rule(
        f"reduce={NAME} computes the loss of language models alone, and {{remedy}} is given; use {FAST}",
        HasOtherObjective("model"),
        remedy=other_objective,
    ),
    Rule(
        f"reduce={NAME}, but cp={{plan.cp}} adds up the keys and values of several ranks in its own order; use a plan "
        f"without cp or {FAST}",
        Is("plan.cp", ">", 1),
    ),
    Rule(
        f"reduce={NAME}, but the plan has styles of its own, which cut other sums; use a plan without them or {FAST}",
        Is("plan.table", "!=", {}),
    ),
)
POSITION_RULES: Rules = (  # of one whose documents have positions of their own
    Rule(
        f"reduce={NAME}, but with data.reset_position_ids=on ranks that cut the sequence share rows of the position "
        f"table, whose gradients they add up in their own order; use a plan without sp or {FAST}",
        Is("reduce", "==", NAME),
        Is("plan.sequence_parallel", "==", True),
        HasPositions("model"),
    ),
)
SETTINGS_RULES: Rules = (
    Rule(
        f"reduce={NAME}, but products in {{products}} have scales of their own; use --precision bf16 or {FAST}",
        Given("products"),
    ),
    Rule(
        f"reduce={NAME}, but compiled blocks choose the order of their sums; use --compile off or {FAST}",
        Given("compile"),
    ),
)

"""The plans that a recipe defines, by names of its own."""

import re
from collections.abc import Mapping

from dtgpt.config.plan import Plan
from dtgpt.config.plan_choice import SINGLE, read_part
from dtgpt.util.errors import UserError, shown


def check_own_plans(own: Mapping[str, Plan]) -> None:
    """Raise UserError where a recipe's plans are not plans, or take names that mean something else."""
    if not isinstance(own, Mapping):
        raise UserError(f"plans={shown(own)} is not a dict; give one such as plans={{'wide': Plan(tp=4)}}")
    for name, plan in own.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_ -]{1,60}", name):
            raise UserError(f"plans has the name {shown(name)}; use up to 60 letters, digits, '_', '-' and spaces")
        if name == SINGLE or all(read_part(part) is not None for part in name.split("_")):
            raise UserError(f"plans defines {shown(name)}, which is a standard plan; give it another name")
        if not isinstance(plan, Plan):
            raise UserError(f"plans[{shown(name)}] is {shown(plan)}; give a Plan, such as Plan(tp=2)")

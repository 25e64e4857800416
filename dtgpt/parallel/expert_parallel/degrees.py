"""Which models and plans can spread experts over ranks of data."""

import math

from dtgpt.config.plan import Plan, divisors
from dtgpt.models.config import ModelConfig
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.util.console import listed
from dtgpt.util.errors import UserError
from dtgpt.util.rules import Given, Is, Rule, Rules

PLAN_RULES: Rules = tuple(  # of a recipe under a `plan`
    Rule(
        f"{option}=on, but under {{plan.name}} the host reads in each step how many rows go to which experts; use "
        f"--{option} off, or a plan without ep",
        Is(option, "==", "on"),
        Given("plan.asks_host"),
    )
    for option in ("graph", "compile")
)


def check_plan(plan: Plan, model: ModelConfig, seq_length: int) -> None:
    """Raise UserError where experts cannot be spread over ep ranks."""
    if not isinstance(model, ExpertsConfig):
        raise UserError(
            f"the plan {plan.name} spreads experts over ep={plan.ep}, but a model of {model.architecture} has none; "
            "leave ep out"
        )
    for size, words in (
        (model.num_experts, f"model.num_experts={model.num_experts} cannot be"),
        (plan.data_ranks, f"dp x cp = {plan.data_ranks} ranks of data cannot be"),
    ):
        if size % plan.ep:
            fitting = divisors(math.gcd(model.num_experts, plan.data_ranks))[1:]
            remedy = f"use ep={listed(fitting)}" if fitting else "leave ep out"
            raise UserError(f"{words} divided over ep={plan.ep}; {remedy}")

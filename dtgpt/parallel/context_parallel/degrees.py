"""What context parallelism makes of a plan: how many of its ranks have different heads in attention, how many different
queries of the same heads, and which models and samples it cannot cut."""

import math

from dtgpt.config.plan import Plan, field_of_length, multiples_beside
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import inventory
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError


def ranks_of_heads(plan: Plan, model: ModelConfig) -> int:
    """Return how many of the cp ranks have different heads in attention: the largest divisor of cp that divides the
    heads of keys and values of a tp rank, in all blocks."""
    return math.gcd(plan.cp, *_kv_heads(plan, model))


def ranks_of_queries(plan: Plan, model: ModelConfig) -> int:
    """Return how many of the cp ranks have the same heads in attention, and different queries."""
    return plan.cp // ranks_of_heads(plan, model)


def _kv_heads(plan: Plan, model: ModelConfig) -> set[int]:
    """Return the heads of keys and values that a tp rank has in the blocks of each kind."""
    parts = inventory(model)
    return {core.kv_heads // plan.tp for block in set(parts.examples) for core in parts.cores(block)}


def check_plan(plan: Plan, model: ModelConfig, seq_length: int) -> None:
    """Raise UserError where samples of this length cannot be cut."""
    pieces, words = plan.cp, f"cp={plan.cp}"
    if plan.sequence_parallel:
        pieces, words = plan.cp * plan.tp, f"cp={plan.cp} x tp={plan.tp} under sequence parallelism"
    if ranks_of_queries(plan, model) > 1:
        pieces, left = math.lcm(pieces, 2 * plan.cp), min(_kv_heads(plan, model))
        words += f", in two halves each, since tp={plan.tp} leaves {counted(left, 'head')} of keys and values"
    if seq_length % pieces:
        name, near = field_of_length(model, seq_length), multiples_beside(seq_length, pieces)
        raise UserError(
            f"{name}={seq_length} cannot be split over {words} ({seq_length % pieces} left over); use --{name} "
            f"{near}, or another cp"
        )

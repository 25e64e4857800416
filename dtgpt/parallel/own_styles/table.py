"""The table of tensor parallelism with what a plan's own `table` says: {module pattern: style, or None: replicated}.

A style may be PyTorch's or one of `dtgpt.parallel.tensor`. What follows from other modules, such as the masks of
dropout, cannot be replaced: FIXED says why.
"""

from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from dtgpt.config.plan import Plan
from dtgpt.models.binding import on_meta
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.layers import DeferredBiasLinear
from dtgpt.models.roles import INNER, Role, matches, patterns_of, role_of
from dtgpt.parallel.collectives import Collectives
from dtgpt.parallel.own_styles.heads import leaves_a_part
from dtgpt.parallel.tensor import DeferredBiasRowwise, SequenceRowwise, Table, make_table, style_of
from dtgpt.util.errors import UserError

if TYPE_CHECKING:
    from dtgpt.config.execution import Settings
    from dtgpt.parallel.engine import TrainingEngine

OF_VOCABULARY = "the loss and the tied table are cut over the vocabulary"
OF_MASKS = "the masks of a dropout site follow from the modules around it"
OF_BRANCH = "all of its branch gets one input, and makes one sum"
OF_SEQUENCE = "what lies between the matrices follows from sequence parallelism"
FIXED = {  # roles that a plan's table cannot replace, and why
    Role.VOCABULARY: OF_VOCABULARY,
    Role.OUTPUT: OF_VOCABULARY,
    Role.HEAD_DROPOUT: OF_MASKS,
    Role.STREAM_DROPOUT: OF_MASKS,
    Role.HEAD_NORM: "each rank normalises its own heads",
    Role.SINKS: "each rank has the sinks of its own heads",
    Role.JOINT_NORM: "each rank has the weights of its own heads",
    Role.NORM: OF_SEQUENCE,
    Role.POSITIONS: OF_SEQUENCE,
    **dict.fromkeys((Role.ENTRY, Role.EXIT, Role.ROUTER, *INNER), OF_BRANCH),
}
OF_HEADS = (Role.HEAD_DROPOUT, Role.HEAD_NORM, Role.SINKS, Role.JOINT_NORM)  # that the QKV projection leaves a rank


def check_plan(plan: Plan, model: ModelConfig, seq_length: int) -> None:
    """Raise UserError where no ranks share modules, and for a pattern or a style that the model cannot have."""
    if plan.tp == 1:
        raise UserError("the plan's table says how tp ranks share modules, but tp=1; add tp2 or more, or leave it out")
    make_table(model, plan)


def with_own_styles(config: ModelConfig, plan: Plan, default: Table, peers: Collectives | None) -> Table:
    """Return the plan's own entries, the most specific first, then the `default` ones: the first that matches a module
    counts. Raises UserError for a pattern that names no module, or one whose style follows from others."""
    with on_meta():
        model = Decoder(config)
    _check_own(plan.table, model)
    row = SequenceRowwise if plan.sequence_parallel else DeferredBiasRowwise
    own = _most_specific_first(plan.table, model)
    deferred = [name for name, module in model.named_modules() if isinstance(module, DeferredBiasLinear)]
    for pattern, style in plan.table.items():
        if type(style) is RowwiseParallel and any(matches(name, pattern) for name in deferred):
            own[pattern] = row(style.output_layouts[0], peers, style.input_layouts[0])
    table = own | {pattern: style for pattern, style in default.items() if pattern not in own}
    table = dict.fromkeys(_of_whole_heads(table, model)) | table
    if plan.sequence_parallel:
        _check_covers(table, model)
    return table


def _of_whole_heads(table: Table, model: Decoder) -> list[str]:
    """Return the modules of heads beside a QKV projection that leaves each rank all of them."""
    roles, found = model.config.roles, []
    last_names = [pattern.rpartition(".")[2] for pattern in patterns_of(Role.QKV, roles)]
    for name, _ in model.named_modules():
        parent = name.rpartition(".")[0]
        if role_of(name, roles) in OF_HEADS and not any(
            leaves_a_part(style_of(f"{parent}.{last}", table)) for last in last_names
        ):
            found.append(name)
    return found


def _most_specific_first(table: Table, model: Decoder) -> dict[str, ParallelStyle | None]:
    """Return the plan's own entries, each before those that match all of its modules and more. Raise UserError for two
    that match a module of which neither is the more specific one."""
    names = [name for name, _ in model.named_modules()]
    matched = {pattern: {name for name in names if matches(name, pattern)} for pattern in table}
    for one, other in combinations(table, 2):
        both = matched[one] & matched[other]
        nested = matched[one] != matched[other] and both in (matched[one], matched[other])
        if both and not nested and table[one] is not table[other]:
            raise UserError(
                f"the plan's table has {one!r} and {other!r}, which both match {min(both)!r}, and neither is a part of "
                "the other; leave one of them out, or name its blocks by a pattern that matches others"
            )
    return {pattern: table[pattern] for pattern in sorted(table, key=lambda pattern: len(matched[pattern]))}


def _check_covers(table: Table, model: Decoder) -> None:
    for name, module in model.named_modules():
        has_parameters = any(True for _ in module.parameters(recurse=False))
        if has_parameters and style_of(name, table) is None:
            raise UserError(
                f"under sequence parallelism {name!r} would see its part of the sequence alone and its gradient would "
                "be wrong; leave its entry out of the plan's table"
            )


def _check_own(table: Table, model: Decoder) -> None:
    roles = model.config.roles
    known = {name: role for name, _ in model.named_modules() if (role := role_of(name, roles))}
    for pattern, style in table.items():
        if style is not None and not isinstance(style, ParallelStyle):
            raise UserError(
                f"the plan's table gives {pattern!r} {style!r}, which is not a style; give one such as "
                "ColwiseParallel(), or None"
            )
        matched = [name for name in known if matches(name, pattern)]
        if not matched:
            free = ", ".join(pattern for pattern, role in roles.items() if role not in FIXED)
            raise UserError(
                f"the plan's table names {pattern!r}, which is not a matrix of the model; use one of {free}"
            )
        for name in matched:
            if reason := FIXED.get(known[name]):
                raise UserError(f"the plan's table replaces {name!r}, but {reason}; leave this entry out")


@torch.no_grad()
def smoke_test_table(engine: "TrainingEngine", settings: "Settings") -> None:
    """Run the model once where a recipe changed the plan's table; raises UserError where its styles do not fit."""
    tokens = torch.zeros(1, settings.local_length, dtype=torch.int64, device=settings.device)
    try:
        engine.logits(tokens)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"the modules of the plan's table do not fit each other ({reason}); give a COLUMN and a ROW module that "
            "follow each other styles that belong together, or leave both out"
        ) from None

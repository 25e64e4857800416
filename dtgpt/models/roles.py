"""What a module is to the rest of dtgpt.

The obvious other way is to name modules where they matter: in the plan, in ZeRO, in planning, in converters. A new
architecture would then change all of these. A role says what a module computes, and not what a plan does with it, so
that a new dimension of plans changes no model.

An architecture (`dtgpt.models.gpt2`) lists the role of each of its modules by name pattern. Tensor parallelism, memory,
messages and FLOPs follow from roles and shapes; code for any architecture names no module.
"""

from collections.abc import Mapping
from enum import Enum
from fnmatch import fnmatch
from functools import lru_cache


class Role(Enum):
    """What a module is. The value says what it computes, or holds."""

    VOCABULARY = "token embedding [V, H]"
    POSITIONS = "table of learned positions [P, H]"
    NORM = "normalisation of the residual stream"
    HEAD_NORM = "normalisation of each head, whose weights all heads share"
    SINKS = "attention core with a learned logit [N] of each head, cut between heads"
    JOINT_NORM = "normalisation of all heads together, whose weights are cut between heads"
    QKV = "linear map to queries, keys and values, cut between heads"
    COLUMN = "linear map [out, H] that is cut by its outputs"
    ROW = "linear map [H, in] that is cut by its inputs, without its bias"
    ENTRY = "beginning of a branch that is cut within: all of it gets the whole input"
    INNER_COLUMN = "linear map [out, H] within such a branch that is cut by its outputs"
    INNER_ROW = "linear map [H, in] within such a branch that is cut by its inputs"
    COLUMN_STACK = "stack [E, out, H] of linear maps within such a branch, each cut by its outputs"
    ROW_STACK = "stack [E, H, in] of linear maps within such a branch, each cut by its inputs"
    ROUTER = "linear map [E, H] to the scores of experts, or what goes with it, whole on each rank"
    EXIT = "end of such a branch: the sum of what ranks have made"
    OUTPUT = "output projection [V, H] and loss"
    HEAD_DROPOUT = "dropout of attention probabilities [N, T, T]"
    STREAM_DROPOUT = "dropout of the residual stream [T, H]"


Roles = Mapping[str, Role]  # module pattern -> role
COLUMNS = (Role.QKV, Role.COLUMN, Role.INNER_COLUMN)
MATRICES = (*COLUMNS, Role.ROW, Role.INNER_ROW)  # of a block
STACKS = (Role.COLUMN_STACK, Role.ROW_STACK)
MLP_COLUMNS = (Role.COLUMN, Role.INNER_COLUMN, Role.COLUMN_STACK)  # the first matrices of an MLP, also in stacks
ROWS = (Role.ROW, Role.INNER_ROW, Role.ROW_STACK)  # cut by their inputs, also in stacks
INNER = (Role.INNER_COLUMN, Role.INNER_ROW, *STACKS)  # within a branch that ENTRY begins


@lru_cache(maxsize=1 << 16)
def matches(name: str, pattern: str) -> bool:
    """Return whether a dotted module name matches a pattern, part by part: `blocks.3.attn` and `blocks.*.attn`."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatch(p, w) for p, w in zip(parts, wanted, strict=True))


def role_of(name: str, roles: Roles) -> Role | None:
    """Return the role of the module called `name`; None for a container."""
    return next((role for pattern, role in roles.items() if matches(name, pattern)), None)


def patterns_of(role: Role, roles: Roles) -> list[str]:
    """Return the module patterns that have this role."""
    return [pattern for pattern, own in roles.items() if own is role]

"""Fields of families whose MLPs are experts, and what follows from them: the parameters that a token meets, and the
widths that tensor parallelism cuts."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from dtgpt.models.inventory import Shape
from dtgpt.models.roles import STACKS, Role, Roles
from dtgpt.models.rotary import RotaryConfig
from dtgpt.ops.experts.routing import Routing
from dtgpt.util.field_types import Bounds
from dtgpt.util.rules import Is, Other, Rule, Rules

MOST_EXPERTS = 65536
# Roles of the modules of a `Mixture`, which a block calls `mlp`.
EXPERT_ROLES: Roles = {
    "blocks.*.mlp.entry": Role.ENTRY,
    "blocks.*.mlp.router": Role.ROUTER,
    "blocks.*.mlp.router.correction": Role.ROUTER,
    "blocks.*.mlp.experts.gate_up": Role.COLUMN_STACK,
    "blocks.*.mlp.experts.down": Role.ROW_STACK,
    "blocks.*.mlp.shared.gate_up": Role.INNER_COLUMN,
    "blocks.*.mlp.shared.down": Role.INNER_ROW,
    "blocks.*.mlp.shared_gate": Role.ROUTER,
    "blocks.*.mlp.exit": Role.EXIT,
}


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(RotaryConfig):
    """Fields of these families. A family says by `routing` how its router chooses, and by `has_experts` in which
    blocks; the others have a dense MLP. `expert_size`, `shared_size` and what follows have defaults that suit a family
    with nothing of the kind."""

    rules: ClassVar[Rules] = (
        *RotaryConfig.rules,
        Rule(
            "model.experts_per_token={experts_per_token} is more than model.num_experts={num_experts}; use "
            "{num_experts} or fewer",
            Is("experts_per_token", ">", Other("num_experts")),
        ),
    )

    num_experts: Annotated[int, "number of experts in a block", Bounds(1, MOST_EXPERTS)]
    experts_per_token: Annotated[int, "number of experts that each token goes through", Bounds(1, MOST_EXPERTS)]

    @property
    def routing(self) -> Routing:
        """How the router of a block chooses."""
        raise NotImplementedError

    @property
    def expert_size(self) -> int:
        """The width of an expert."""
        return self.ffn_hidden_size

    @property
    def shared_size(self) -> int:
        """The width of the MLP that every token goes through beside its experts; 0: there is none."""
        return 0

    @property
    def cut_by_tp(self) -> dict[str, int]:
        return {**super().cut_by_tp, "expert_size": self.expert_size, "shared_size": self.shared_size}

    @property
    def gates_shared(self) -> bool:
        """Whether a gate multiplies the output of the shared MLP."""
        return False

    @property
    def expert_biases(self) -> bool:
        """Whether the router and the matrices of experts have biases."""
        return False

    @property
    def corrects_choice(self) -> bool:
        """Whether the router has a correction of its scores, by which experts are chosen and not weighed."""
        return False

    gated_stacks: ClassVar[bool] = True  # gate and up of an expert lie interleaved in one stack

    def has_experts(self, index: int) -> bool:
        """Return whether the MLP of block `index` is a mixture of experts."""
        return True

    def block_kind(self, index: int) -> Hashable:
        return super().block_kind(index), self.has_experts(index)

    def used_elements(self, shape: Shape, role: Role | None) -> int:
        whole = math.prod(shape)
        return whole // self.num_experts * self.experts_per_token if role in STACKS else whole

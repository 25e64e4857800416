"""The layout of each parameter of a model under a plan, from shapes, roles and styles alone: planning has no ranks."""

from collections.abc import Mapping
from typing import Any

from dtgpt.config.plan import ResolvedPlan
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Parameter, inventory
from dtgpt.models.roles import STACKS
from dtgpt.parallel.layout import ZERO, ParameterLayout, axes_of


class Layout:
    """The layout of each parameter of a model under a plan."""

    def __init__(self, config: ModelConfig, plan: ResolvedPlan, table: Mapping[str, Any] | None = None):
        """table: styles of tensor parallelism; None: those of the plan."""
        self.config, self.plan = config, plan
        self._table = table
        if plan.tp > 1 and not table:
            from dtgpt.parallel.tensor import make_table  # DTensor, which no other plan needs

            self._table = make_table(config, plan)
        self._examples = inventory(config).examples
        self._known: dict[tuple[int | None, str], ParameterLayout] = {}

    def of(self, parameter: Parameter) -> ParameterLayout:
        """Return the layout of a parameter. Blocks of one kind have the same one, unless the plan's own table names
        some of them."""
        name, block = parameter.name, parameter.block
        key = block, name
        if block is not None and not self.plan.table:
            key = self._examples[block], name.removeprefix(f"blocks.{block}.")
        if key not in self._known:
            self._known[key] = self._make(parameter)
        return self._known[key]

    def _make(self, parameter: Parameter) -> ParameterLayout:
        own = self.plan.own_axes if parameter.role in STACKS else {}
        axes, cuts = axes_of(self.plan, own), {**ZERO, **dict.fromkeys(own, 0)}  # which divide the matrices of a stack
        if self.plan.tp == 1:
            return ParameterLayout(parameter.shape, axes, cuts)
        from dtgpt.parallel.local_weights.dims import dims_of
        from dtgpt.parallel.tensor import style_of

        module, _, kind = parameter.name.rpartition(".")
        style = style_of(module, self._table or {})
        dim = dims_of(style).get(kind)
        return ParameterLayout(
            shape=parameter.shape,
            axes=axes,
            cuts=cuts if dim is None else {**cuts, "tp": dim},
            sums_over=("tp",) if kind in getattr(style, "sums_over_tp", ()) else (),
            style=style,
        )

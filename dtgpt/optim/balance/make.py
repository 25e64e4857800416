"""The balance of a run whose model has experts; what it computes with is imported for such a run alone."""

from typing import TYPE_CHECKING, Any

from dtgpt.config.execution import Settings
from dtgpt.parallel.gradients import choose_sums
from dtgpt.parallel.mesh import Mesh
from dtgpt.posttrain.demands import makes_samples

if TYPE_CHECKING:
    from dtgpt.optim.balance.state import Balances


def make_balance(recipe: Any, settings: Settings, mesh: Mesh) -> "Balances | None":
    """Return what counts the loads of experts, and keeps them even where the recipe says so; None without experts."""
    if not hasattr(settings.model, "num_experts"):
        return None
    from dtgpt.models.moe.config import ExpertsConfig
    from dtgpt.optim.balance.config import BalanceConfig
    from dtgpt.optim.balance.state import Balances

    model = settings.model
    if not isinstance(model, ExpertsConfig) or not any(map(model.has_experts, range(model.num_layers))):
        return None
    # Where a pass that trains has the choices of one that looks at the loads alone, which drops nothing.
    alone = mesh.world == 1 and not (model.dropout or settings.products or settings.compile)
    whole = choose_sums(settings).spans_tp  # gradients of routers
    made = Balances(model, settings.section(BalanceConfig), mesh, alone=alone, each_adds=whole)
    made.knows_padding = not makes_samples(settings.sections)
    return made

"""What computes the attention cores of a training step, by its settings."""

from typing import cast

from dtgpt.config.execution import Settings
from dtgpt.models.inventory import Core, inventory
from dtgpt.ops.attention.core import Backend, Case, in_pytorch, kernel_for

SCORES: tuple[Backend, ...] = ("explicit", "fused_softmax")  # which keep scores for backward


def attention_backend(settings: Settings) -> Backend:
    """Return the back end of a training step."""
    return _backend_for(settings, settings.model.head_dim)


def backend_of(settings: Settings, core: Core) -> Backend:
    """Return the back end of an attention core in a training step: that of the run, unless the core has a rule which
    this does not know."""
    return _backend_for(settings, core.head_dim, core.softcap, core.sinks)


def scores_backend(settings: Settings) -> Backend | None:
    """Return a back end of an attention core that keeps scores for backward; None where none does."""
    backends = {backend_of(settings, core) for core in inventory(settings.model).kinds_of_cores()}
    return next((each for each in SCORES if each in backends), None)


def _backend_for(settings: Settings, head_dim: int, softcap: bool = False, sinks: bool = False) -> Backend:
    case = Case(settings.device, settings.dtype, head_dim, settings.model.dropout > 0, softcap, sinks)
    return backend_for(case, settings.attention)


def backend_for(case: Case, backend: Backend = "auto") -> Backend:
    """Return the name of what computes attention."""
    if backend != "auto":
        return backend
    kernel = kernel_for(case)
    return in_pytorch(case) if kernel is None else cast(Backend, kernel.name)

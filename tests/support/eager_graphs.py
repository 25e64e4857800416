"""Steps of generation as on a GPU, whose CUDA graphs run eagerly here."""

from collections.abc import Callable
from typing import Any

from dtgpt.inference.captured.step import CapturedStep
from dtgpt.inference.engine import Engine
from dtgpt.inference.step import Step


class EagerGraphs:
    """In place of `StepGraphs`: runs the work itself."""

    def release(self) -> None: ...

    def run(self, name: Any, work: Callable[..., Any], inputs: tuple[Any, ...], idle: Callable[[], Any]) -> Any:
        return work(*inputs)


def let_read_together(step: Step, batch_tokens: int) -> CapturedStep:
    """Let a step read prompts together, at most `batch_tokens` in a pass, as on a GPU."""
    step.__class__ = CapturedStep
    assert isinstance(step, CapturedStep)
    step._graphs, step._equal = EagerGraphs(), {}  # type: ignore[assignment]
    step.batch_tokens = batch_tokens
    return step


def with_prompts_together(engine: Engine, batch_tokens: int) -> Engine:
    """Let an engine read prompts together, unless batch_tokens is 0."""
    if batch_tokens:
        let_read_together(engine._rank_step, batch_tokens)
    return engine

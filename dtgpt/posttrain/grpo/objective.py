"""The objective of reinforcement learning: that answers of the model to prompts have larger rewards (GRPO)."""

from pathlib import Path
from typing import Any

from torch import Tensor

from dtgpt.models.batch import Batch
from dtgpt.posttrain.grpo.answers import describe
from dtgpt.posttrain.grpo.rollouts import Rollouts
from dtgpt.train.objective import Interrupted, LanguageModel, Parts, never


class Reinforcement(LanguageModel):
    """Batches are answers that the model draws; the data are for validation and test alone, as a language model."""

    def bind(self, parts: Parts) -> None:
        super().bind(parts)
        self.rollouts = Rollouts(
            grpo=self.given.section,
            stages=parts.stages,
            mesh=parts.mesh,
            settings=parts.settings,
            tokenizer=self.dataset.tokenizer,
            ends=parts.ends,
            seed=self.given.seed,
            timeout=self.given.timeout,
        )

    def restore(self, state: dict[str, Any]) -> None:
        self.rollouts.restore(state)

    def state(self, step: int) -> dict[str, Any]:
        return {"prompts": self.rollouts.prompts(step).start}

    def prepare(self, step: int, run: Path | None, interrupted: Interrupted = never) -> bool:
        if step < self.given.steps:
            self.rollouts.check_prompt(step)
        return True

    def take(self, step: int) -> tuple[Batch, Tensor | None]:
        batch = self.rollouts.batch(step)
        return batch, self.counted(batch) == 0

    def batch(self, step: int) -> Batch:
        return self.rollouts.batch(step)

    def figures(self, interval: Any) -> dict[str, float]:
        return self.rollouts.figures()

    def examples(self) -> dict[str, str]:
        found = self.rollouts.best_and_worst
        return {} if found is None else dict(zip(("best", "worst"), map(describe, found), strict=True))

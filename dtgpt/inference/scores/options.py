"""The option of a prompt that asks for its scores."""

from dataclasses import dataclass
from typing import Annotated

from dtgpt.inference.base_options import BaseOptions


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(BaseOptions):
    """The option, as it is declared."""

    prompt_logprobs: Annotated[bool, "return the log-probabilities of the prompt's tokens"] = False

    @property
    def answers_by_prompt(self) -> bool:
        return self.prompt_logprobs or super().answers_by_prompt

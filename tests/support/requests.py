"""Requests to the engine, by what differs from one to the next."""

from dataclasses import replace
from typing import Any

from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.options import Options
from dtgpt.inference.request import NO_SPECIAL_IDS, PromptJob


def make_request(
    ids: list[int],
    sampling: Options,
    choices: int = 1,
    score_prompt: bool = False,
    alternatives: int = 0,
    search: Any = None,
    **changes: int | str | SpecialIds,
) -> PromptJob:
    """Return a request that goes on from ids. changes: other fields of it."""
    of_capabilities = {"prompt_logprobs": score_prompt, "search": search}
    asked = {name: value for name, value in of_capabilities.items() if value}
    options = replace(sampling, num_return_sequences=choices, top_logprobs=alternatives, **asked)
    return PromptJob(ids, options, **{"special": NO_SPECIAL_IDS, **changes})  # type: ignore[arg-type]

"""Prompts of Python programs: texts or ids, one or many."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.prompts import encode
from dtgpt.inference.request import check_prompt
from dtgpt.models.config import ModelConfig
from dtgpt.util.errors import UserError, shown

KINDS = "a text, a list of ids, or a list of either"


class GivenPrompts(NamedTuple):
    """Prompts, and in which form they were given."""

    ids: list[list[int]]
    texts: list[str] | None  # None: they were given as ids
    single: bool  # one prompt, not a list of them


def read_prompts(
    prompts: Any, tokenizer: Callable[[], Tokenizer], config: ModelConfig, split_special_tokens: bool = False
) -> GivenPrompts:
    """Return prompts given as a text, a list or tensor of ids, or a list of either. `tokenizer`: returns that of the
    model, or raises UserError. Raise UserError for any other value, an empty list, and ids that the model does not
    have."""
    if isinstance(prompts, Tensor):
        prompts = _as_list(prompts)
    single = isinstance(prompts, str) or (_is_list(prompts) and all(map(_is_id, prompts)))
    several = [prompts] if single else prompts
    if not _is_list(several):
        raise UserError(f"{shown(prompts)} is not a prompt; give {KINDS}")
    if all(isinstance(prompt, str) for prompt in several):
        ids = [encode(text, tokenizer(), config, split_special_tokens) for text in several]
        return GivenPrompts(ids, list(several), single)
    return GivenPrompts([check_ids(prompt, config) for prompt in several], None, single)


def check_ids(prompt: Any, config: ModelConfig) -> list[int]:
    """Return the ids of a prompt that was given as ids. Raise UserError where they are not the model's."""
    ids = _as_list(prompt) if isinstance(prompt, Tensor) else prompt
    if not _is_list(ids) or not all(map(_is_id, ids)):
        raise UserError(f"{shown(prompt)} is not a prompt; give {KINDS}")
    check_prompt(list(ids), config.vocab_size)
    return list(ids)


def _as_list(tensor: Tensor) -> Any:
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise UserError(f"the prompt {shown(tensor)} has no numbers in order; give a plain tensor of ids")
    return tensor.tolist()


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

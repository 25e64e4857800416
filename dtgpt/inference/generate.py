"""Sample text from a model. The draw for position i is a function of (key, i), so that samples can be repeated."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dtgpt.data.tokenizers.open import FILES, make_tokenizer
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.interop.tokenizer import tokenizer_beside
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.gpt2 import GPT2_124M
from dtgpt.ops.random.philox import uniform
from dtgpt.util.errors import UserError

LogitsAt = Callable[[Tensor, int], Tensor]  # (window int64 [1, T], position) -> logits [V] of the token after it


class Sampling(NamedTuple):
    """How tokens are chosen."""

    new_tokens: int  # largest number of them
    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 0  # number of likeliest tokens to choose from; 0: all


def logits_of(model: Decoder) -> LogitsAt:
    """Return the logits of a whole model on this device."""
    return lambda window, position: model(window)[0, position]


@torch.no_grad()
def generate(
    logits_at: LogitsAt,
    config: ModelConfig,
    prompt: list[int],
    sampling: Sampling,
    key: Tensor,
    vocab_size: int | None = None,
    stop: Callable[[int], bool] = lambda token: False,
) -> list[int]:
    """Return up to `new_tokens` ids that continue the non-empty `prompt`, ending after one for which `stop` is true.

    temperature 0 takes the likeliest token. Ids stay below `vocab_size` (default: the model's).
    The model sees the last `seq_length` tokens, in a window of fixed shape, so that nothing is recompiled; causal
    attention never reads its padded end.
    """
    device = key.device
    draws = uniform(key, (sampling.new_tokens,)).tolist()
    vocab_size = vocab_size or config.vocab_size
    ids = list(prompt)
    for draw in draws:
        context = ids[-config.seq_length :]
        window = torch.tensor([context + [0] * (config.seq_length - len(context))], device=device)
        logits = logits_at(window, len(context) - 1)[:vocab_size]
        # On the CPU every rank of a plan comes to the same choice; sums on a GPU may differ in the last bit.
        ids.append(choose(logits.double().cpu(), draw, sampling.temperature, sampling.top_k))
        if stop(ids[-1]):
            break
    return ids[len(prompt) :]


def choose(logits: Tensor, draw: float, temperature: float, top_k: int) -> int:
    """Return the id whose share of the cumulative distribution contains `draw`, in (0, 1); logits are float64 `[V]`."""
    if temperature == 0:
        return int(logits.argmax())
    values, candidates = logits.topk(min(top_k, len(logits)) if top_k else len(logits))
    shares = torch.softmax((values - values[0]) / temperature, dim=-1).cumsum(dim=-1)
    place = int(torch.searchsorted(shares, draw * shares[-1]))
    return int(candidates[min(place, len(candidates) - 1)])


def sample_text(
    logits_at: LogitsAt, config: ModelConfig, tokenizer: Tokenizer, prompt: str, sampling: Sampling, key: Tensor,
    interrupted: Callable[[], bool] = lambda: False,
) -> str:  # fmt: skip
    """Return `prompt` and its continuation, up to the end of a document; an empty prompt begins a document."""
    end = tokenizer.end_of_text
    ids = tokenizer.encode(prompt)
    if not ids:
        if tokenizer.opening is None:
            raise UserError(
                f"the tokenizer {tokenizer.name} has no end of text to begin a document with; give --prompt"
            )
        ids = [tokenizer.opening]
    if max(ids) >= config.vocab_size:
        raise UserError(
            f"the prompt has token {max(ids)} of {tokenizer.name}, but the model has {config.vocab_size} tokens; "
            "give the tokenizer that the model was trained with"
        )

    def stop(token: int) -> bool:
        return token == end or interrupted()

    vocab_size = min(tokenizer.vocab_size, config.vocab_size)
    new = generate(logits_at, config, ids, sampling, key, vocab_size, stop)
    # Decoded with the prompt, since some tokenizers drop a leading blank.
    whole = tokenizer.decode([*ids, *(token for token in new if token != end)])
    return prompt + whole[len(tokenizer.decode(ids)) :]


def tokenizer_of(path: Path, config: ModelConfig) -> Tokenizer:
    """Return the tokenizer saved with the run or folder; else GPT-2's own, if the model has as many tokens."""
    if beside := tokenizer_beside(path):
        return beside
    if config.vocab_size == GPT2_124M.vocab_size:
        return make_tokenizer("gpt2", [], 0)
    raise UserError(
        f"no tokenizer is saved with {path}, whose {config.vocab_size} tokens are not GPT-2's; give a run folder, "
        f"or {FILES}"
    )

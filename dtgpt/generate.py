"""Sampling text from a model. The draw for position i is a function of (key, i): samples can be repeated."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from dtgpt.device import memory_errors_as_sentences
from dtgpt.errors import UserError
from dtgpt.interop.open import open_source
from dtgpt.interop.source import load_model
from dtgpt.interop.tokenizer import named_tokenizer, tokenizer_beside
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.gpt2 import GPT2_124M
from dtgpt.ops.random import root_key, uniform
from dtgpt.tokenizers.open import OF_MODELS, make_tokenizer
from dtgpt.tokenizers.tokenizer import Tokenizer

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
    """Return the ids after the non-empty `prompt`; ends after a token for which `stop` is true.

    Ids stay below `vocab_size` (default: the model's). The model sees the last `seq_length` tokens, in a window of
    fixed shape whose unused end is padded: causal attention never looks there, and nothing is compiled anew.
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
    """Return the id whose share of the distribution contains `draw` (in (0, 1)); logits float64 `[V]`."""
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
    ids = tokenizer.encode(prompt) or [tokenizer.opening]
    if ids == [None]:
        raise UserError(f"the tokenizer {tokenizer.name} names no end of text to begin a document with; give --prompt")
    if max(ids) >= config.vocab_size:
        raise UserError(
            f"the prompt has the token {max(ids)} of {tokenizer.name}, where the model has {config.vocab_size} tokens; "
            "give the tokenizer that the model was trained with"
        )

    def stop(token: int) -> bool:
        return token == end or interrupted()

    vocab_size = min(tokenizer.vocab_size, config.vocab_size)
    new = generate(logits_at, config, ids, sampling, key, vocab_size, stop)
    # Decoded with the prompt: some tokenizers drop a blank at the beginning of what they decode.
    whole = tokenizer.decode([*ids, *(token for token in new if token != end)])
    return prompt + whole[len(tokenizer.decode(ids)) :]


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Continue a text with a model. RUN is a run folder, whose newest checkpoint is used, or any model that `dtgpt
    convert` reads."""

    prompt: Annotated[str, "text to continue; empty: begin a document"] = ""
    tokens: Annotated[int, "largest number of tokens to add"] = 200
    temperature: Annotated[float, "sampling temperature; 0: always the likeliest token"] = 0.8
    top_k: Annotated[int, "number of likeliest tokens to choose from; 0: all"] = 50
    seed: Annotated[int, "seed of the sampling"] = 0
    tokenizer: Annotated[
        str | None, "as dtgpt prepare takes it: a file, or a name such as gpt2; none: that of the run or folder"
    ] = None
    vocab_file: Annotated[str | None, "vocab.json of a BPE like GPT-2's, with --merge_file"] = None
    merge_file: Annotated[str | None, "merges.txt, with --vocab_file"] = None


@memory_errors_as_sentences("ask for fewer tokens")
def generate_from(path: Path, config: GenerateConfig) -> str:
    """Continue a text with the newest checkpoint of a run folder, or with a model of another library."""
    for name in ("tokens", "temperature", "top_k"):
        if getattr(config, name) < 0:
            raise UserError(f"{name}={getattr(config, name)} is negative; use 0 or more")
    source = open_source(path)
    named = named_tokenizer(source.config, config.tokenizer, config.vocab_file, config.merge_file)
    tokenizer = named or tokenizer_of(path, source.config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(source, device)
    key = root_key(config.seed, device)
    sampling = Sampling(config.tokens, config.temperature, config.top_k)
    return sample_text(logits_of(model), model.config, tokenizer, config.prompt, sampling, key)


def tokenizer_of(path: Path, config: ModelConfig) -> Tokenizer:
    """That of the run or folder; GPT-2's own for a model of another library with as many tokens."""
    if beside := tokenizer_beside(path):
        return beside
    if config.vocab_size == GPT2_124M.vocab_size:
        return make_tokenizer("gpt2", [], 0, OF_MODELS.remedy)
    raise UserError(
        f"nothing tells the tokenizer of {path}, whose {config.vocab_size} tokens are not GPT-2's; give a run "
        f"folder, or {OF_MODELS.remedy.removeprefix('give ')}"
    )

"""`dtgpt generate`: continue a text with a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from dtgpt.commands.command import Command
from dtgpt.inference.generate import Sampling, logits_of, sample_text, tokenizer_of
from dtgpt.interop.open import open_source
from dtgpt.interop.tokenizer import named_tokenizer
from dtgpt.models.source import load_model
from dtgpt.ops.random.philox import root_key
from dtgpt.util.console import say
from dtgpt.util.field_types import Bounds
from dtgpt.util.hardware import memory_errors_as_user_errors


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Continue a text with a model. RUN is a run folder, whose newest checkpoint is used, or any model that `dtgpt
    convert` reads."""

    prompt: Annotated[str, "text to continue; empty: begin a document"] = ""
    tokens: Annotated[int, "largest number of tokens to add", Bounds(0)] = 200
    temperature: Annotated[float, "sampling temperature; 0: always the likeliest token", Bounds(0)] = 0.8
    top_k: Annotated[int, "number of likeliest tokens to choose from; 0: all", Bounds(0)] = 50
    seed: Annotated[int, "seed of the sampling"] = 0
    tokenizer: Annotated[
        str | None, "tokenizer file, or a name such as gpt2; none: the tokenizer saved with the model"
    ] = None
    vocab_file: Annotated[str | None, "vocab.json of a BPE like GPT-2's, with --merge-file"] = None
    merge_file: Annotated[str | None, "merges.txt, with --vocab-file"] = None


@memory_errors_as_user_errors("ask for fewer tokens")
def generate_from(path: Path, options: GenerateOptions) -> str:
    """Return a text continued with the newest checkpoint of a run folder, or with a model of another library."""
    source = open_source(path)
    named = named_tokenizer(source.config, options.tokenizer, options.vocab_file, options.merge_file)
    tokenizer = named or tokenizer_of(path, source.config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(source, device)
    sampling = Sampling(options.tokens, options.temperature, options.top_k)
    key = root_key(options.seed, device)
    return sample_text(logits_of(model), model.config, tokenizer, options.prompt, sampling, key)


def generate(path: Path, options: GenerateOptions) -> None:
    say(generate_from(path, options))


command = Command("generate RUN", GenerateOptions, generate, "runs/gpt2_tiny-001 --prompt Hello")

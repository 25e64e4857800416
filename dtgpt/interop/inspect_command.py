"""`dtgpt inspect`: what a path holds, a model or token files."""

import os
from dataclasses import dataclass, replace
from glob import has_magic
from itertools import repeat
from pathlib import Path
from typing import Annotated

from dtgpt.commands.command import Command
from dtgpt.commands.model_options import RecipeFile
from dtgpt.config.recipe_file import model_class
from dtgpt.data.megatron.blend import as_weight, normalised, parse_data_path
from dtgpt.data.megatron.paths import SHARDS, bin_path, idx_path, prefix_of, prefixes_near
from dtgpt.data.megatron.prepared import open_sequences
from dtgpt.data.megatron.token_shards import TokenShards
from dtgpt.data.prepare.command import ALIASES
from dtgpt.data.prepare.inspect import InspectDataConfig, describe
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.interop.inspect import inspect as inspect_model
from dtgpt.interop.llmc import MAGIC
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import changed_fields
from dtgpt.util.storage import located, open_regular

MODELS = (MAGIC.to_bytes(4, "little"), b"PK\x03\x04")  # first bytes of a .bin of llm.c and of one of PyTorch
OF_MODELS = {"recipe", "tensors"}


@dataclass(frozen=True, kw_only=True)
class InspectOptions(InspectDataConfig):
    """Describe what a path holds:

      model         a run, a checkpoint or a model of another library; each file of
                    a checkpoint is verified
      token files   PREFIX of a .bin and .idx, or shards: .bin of llm.c or nanoGPT, .npy (several: a quoted glob); also
                    a blend, as in dtgpt inspect 0.3 PREFIX1 0.7 PREFIX2

    All options but --recipe and --tensors apply to token files."""

    recipe: RecipeFile = None
    tensors: Annotated[bool, "list every parameter of a model with its shape and the SHA-256 of its values"] = False


def inspect(options: InspectOptions) -> None:
    """Print what the paths `options.input` hold. Raises UserError."""
    options = replace(options, input=tuple(os.fspath(located(word)) for word in options.input))
    changed = changed_fields(options) - {"input"}
    for_data = changed - OF_MODELS
    models = [word for word in options.input if Path(word).exists() and not _means_tokens(word)]
    if models:
        _refuse(for_data, f"applies to token files, and {models[0]} is a model")
    weighted = len(options.input) > 1 and any(as_weight(word) is not None for word in options.input)
    if for_data or weighted or any(map(_means_tokens, options.input)):
        _inspect_data(options, changed)
    elif len(options.input) == 1:
        say(inspect_model(Path(options.input[0]), options.tensors, model_class(options.recipe)))
    else:
        raise UserError(
            f"dtgpt inspect needs one MODEL or PREFIX, not {' '.join(options.input) or 'none'}, such as dtgpt inspect "
            "runs/gpt2_tiny-001; --tensors takes on, off or no value"
        )


def _means_tokens(word: str) -> bool:
    if idx_path(prefix_of(word)).is_file():
        return True
    path = Path(word)
    if path.exists():
        return path.suffix in SHARDS and not path.is_dir() and not _begins_as_model(path)
    return word.endswith((*SHARDS, ".idx")) or has_magic(word) or bin_path(word).is_file() or bool(prefixes_near(word))


def _begins_as_model(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(4) in MODELS
    except OSError:
        return True  # opening it as a model reports the error


def _inspect_data(options: InspectOptions, changed: set[str]) -> None:
    prefixes, weights = parse_data_path(options.input)
    _refuse(changed & OF_MODELS, f"applies to models, and {prefixes[0]} is token files")
    vocabulary = None
    if options.tokenizer is not None or options.vocab_file is not None or options.merge_file is not None:
        vocabulary = open_tokenizer(options.tokenizer or "gpt2", options.vocab_file, options.merge_file)
    eot = options.eot if options.eot is not None or vocabulary is None else vocabulary.end_of_text
    begin = None if options.eot is not None or vocabulary is None else vocabulary.begin_of_text
    opened = [open_sequences(prefix, eot, begin) for prefix in prefixes]
    if not any(isinstance(sequences, TokenShards) for sequences in opened):
        _refuse(changed & {"eot"}, f"applies to shards, and {prefixes[0]} has an .idx")
    shares = repeat(None) if weights is None else normalised(weights)
    for prefix, sequences, fraction in zip(prefixes, opened, shares, strict=False):
        say(describe(prefix, sequences, fraction, options, vocabulary))


def _refuse(options: set[str], why: str) -> None:
    if options:
        raise UserError(f"--{min(options).replace('_', '-')} {why}; leave it out")


command = Command("inspect MODEL|PREFIX", InspectOptions, inspect, "runs/gpt2_tiny-001", aliases=ALIASES)

"""`dtgpt convert`: a model from one format to another."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from dtgpt.checkpoint.export import save_weights
from dtgpt.checkpoint.load import Saved
from dtgpt.console import parameters, say
from dtgpt.errors import UserError
from dtgpt.execution import DTYPES
from dtgpt.interop.huggingface import save_huggingface
from dtgpt.interop.megatron import Megatron
from dtgpt.interop.megatron_export import save_megatron
from dtgpt.interop.open import open_source
from dtgpt.interop.source import Source
from dtgpt.interop.tokenizer import named_tokenizer, tokenizer_beside
from dtgpt.tokenizers.export import export_note, transformers_files
from dtgpt.tokenizers.open import OF_MODELS
from dtgpt.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Convert a model to another format. MODEL is a run folder, a checkpoint, a Hugging Face folder, a Megatron-LM
    tree, or a file of nanoGPT or llm.c; the format is recognized. TARGET is a path that does not exist yet. Nothing is
    written where an option does not fit or the source is damaged."""

    to: Annotated[
        Literal["dtgpt", "hf", "megatron"], "a checkpoint of weights, a Hugging Face folder, or a Megatron-LM tree"
    ] = "dtgpt"
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], "type of the written weights; dtgpt takes fp32 only"] = "fp32"
    target_tensor_parallel_size: Annotated[int, "tensor parallel size of the Megatron-LM tree"] = 1
    target_pipeline_parallel_size: Annotated[int, "pipeline parallel size of the Megatron-LM tree"] = 1
    true_vocab_size: Annotated[
        int | None, "vocabulary size without padding, of a Megatron-LM tree; none: 50257 where the tree fits it"
    ] = None
    tokenizer: Annotated[
        str | None, "tokenizer that is kept with the model, as dtgpt prepare takes it; none: that of the run or folder"
    ] = None
    vocab_file: Annotated[str | None, "vocab.json of a BPE like GPT-2's, with --merge_file"] = None
    merge_file: Annotated[str | None, "merges.txt, with --vocab_file"] = None


def convert(path: Path, target: Path, config: ConvertConfig) -> None:
    """Read the model at `path`, whatever wrote it, and write it to `target`. Raises UserError where an option does not
    fit, the source is damaged or the target exists; then nothing is written."""
    _check(config)
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists already; give another path")
    source = open_source(path, true_vocab_size=config.true_vocab_size)
    if config.true_vocab_size is not None and not isinstance(source, Megatron):
        raise UserError(
            f"true_vocab_size={config.true_vocab_size} is of a Megatron-LM tree alone; leave it out: {path} tells it"
        )
    for note in source.notes:
        say(note, warning=True)
    dtype = DTYPES[config.dtype]
    named = named_tokenizer(source.config, config.tokenizer, config.vocab_file, config.merge_file)
    if config.to == "dtgpt":
        save_weights(source, target, str(path), named or tokenizer_beside(path))
    elif config.to == "hf":
        tokenizer = named or tokenizer_beside(path)
        save_huggingface(source, target, dtype, tokenizer, _files_of(tokenizer, source, path, target))
    else:
        sizes = config.target_tensor_parallel_size, config.target_pipeline_parallel_size
        state = source.checkpoint.state if isinstance(source, Saved) else {"step": 0, "consumed_samples": 0}
        save_megatron(source, target, *sizes, dtype, state["step"] or None, state["consumed_samples"])
    say(f"{target}: {parameters(source.config.num_parameters)}, {config.dtype}")


def _check(config: ConvertConfig) -> None:
    """No option is taken that would change nothing."""
    if config.to == "dtgpt" and config.dtype != "fp32":
        raise UserError(f"dtype={config.dtype}: a checkpoint of dtgpt holds fp32 weights; leave --dtype out")
    for name in ("target_tensor_parallel_size", "target_pipeline_parallel_size"):
        size = getattr(config, name)
        if size < 1:
            raise UserError(f"{name}={size} is no number of ranks; use 1 or more")
        if size != 1 and config.to != "megatron":
            raise UserError(f"{name}={size} is of a Megatron-LM tree alone; leave it out: dtgpt cuts when it loads")
    given = config.tokenizer or config.vocab_file or config.merge_file
    if given and config.to == "megatron":
        raise UserError(f"the tokenizer {given} has no place in a Megatron-LM tree; leave it out")


def _files_of(tokenizer: Tokenizer | None, source: Source, path: Path, target: Path) -> dict[str, Any] | None:
    """The tokenizer's files for transformers; None, which is said, where there are none that would be right."""
    if tokenizer is None:
        say(f"nothing tells the tokenizer of {path}, so that {target} has none; {OF_MODELS.remedy}")
        return None
    try:
        files = transformers_files(tokenizer, source.config.seq_length)
    except UserError as error:
        say(f"{error}; the model is written without a tokenizer", warning=True)
        return None
    if told := export_note(tokenizer):
        say(told, warning=True)
    return files

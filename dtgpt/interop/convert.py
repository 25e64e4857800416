"""`dtgpt convert`: a model from one format to another."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from dtgpt.checkpoint.export import save_weights
from dtgpt.checkpoint.load import Saved
from dtgpt.console import parameters, say
from dtgpt.device import DTYPES
from dtgpt.errors import UserError
from dtgpt.interop.huggingface import save_huggingface
from dtgpt.interop.megatron import Megatron
from dtgpt.interop.megatron_export import save_megatron
from dtgpt.interop.open import open_source, run_of
from dtgpt.run import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    to: Annotated[
        Literal["dtgpt", "hf", "megatron"], "a checkpoint of weights, a Hugging Face folder, a Megatron-LM tree"
    ] = "dtgpt"
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], "of the weights that are written; dtgpt keeps fp32"] = "fp32"
    target_tensor_parallel_size: Annotated[int, "of the Megatron-LM tree"] = 1
    target_pipeline_parallel_size: Annotated[int, "of the Megatron-LM tree"] = 1
    true_vocab_size: Annotated[int | None, "tokens of the tokenizer; none: 50257 where a Megatron-LM tree fits it"] = (
        None
    )


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
    if config.to == "dtgpt":
        run = run_of(path)
        save_weights(source, target, str(path), load_tokenizer(run) if run else None)
    elif config.to == "hf":
        save_huggingface(source, target, dtype)
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

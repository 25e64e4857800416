"""Rows of new tokens in a folder of peft: its `trainable_token_indices`. The base has to have the rows before peft
opens the folder (transformers' `resize_token_embeddings`)."""

from typing import Any

from torch import Tensor

from dtgpt.interop.hf.architecture import Architecture
from dtgpt.posttrain.add_tokens.source import ids_of, saved_rows
from dtgpt.posttrain.lora.checkpoint import SavedAdapter
from dtgpt.util.console import say


def rows_for_peft(
    adapter: SavedAdapter, architecture: Architecture, outer: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors of new rows by the names of peft's file, and what its settings say of them. outer: of all names
    there."""
    config, ids = adapter.config, ids_of(adapter.checkpoint)
    tensors: dict[str, Tensor] = {}
    indices: dict[str, list[int]] = {}
    for name in (config.table_name, *([] if config.tied else [config.output_name])) if ids else ():
        (plain,) = architecture.stored_names(name, config)
        module = plain.removesuffix(".weight")
        prefix = "" if name == config.output_name else architecture.prefix
        tensors[f"{outer}{prefix}{module}.token_adapter.trainable_tokens_delta"] = saved_rows(adapter.checkpoint, name)
        indices[module] = list(ids)
    if ids:
        say(f"the base needs {config.vocab_size} rows: model.resize_token_embeddings({config.vocab_size})")
    return tensors, {"trainable_token_indices": indices} if ids else {}

"""Rows of tokens in a folder of peft: its `trainable_token_indices`. The base has to have the rows before peft
opens the folder (transformers' `resize_token_embeddings`). Trained rows stand in the place of the base's."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtgpt.interop.foreign import check_stored
from dtgpt.interop.hf.architecture import Architecture
from dtgpt.models.config import ModelConfig
from dtgpt.models.source import Ranges
from dtgpt.posttrain.add_tokens.source import ids_of, saved_rows
from dtgpt.posttrain.lora.checkpoint import SavedAdapter
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, shown, shown_name

INDICES, DELTA = "trainable_token_indices", "token_adapter.trainable_tokens_delta"
OUTER = "base_model.model."  # of all names in the file


class Rows(NamedTuple):
    """Rows of a table with a row for each token, int64 `[N]` and fp32 `[N, columns]`."""

    ids: Tensor
    values: Tensor

    def put_into(self, table: Tensor, part: Ranges | None) -> Tensor:
        """Return the elements `part` of the table with these rows in their places."""
        rows, columns = part or tuple(map(range, table.shape))
        here = (self.ids >= rows.start) & (self.ids < rows.stop)
        found = table.clone()
        found[self.ids[here] - rows.start] = self.values[here, columns.start : columns.stop]
        return found


def are_indices(value: Any) -> bool:
    """Return whether settings say of which tokens rows are trained: of embeddings, or module by module."""
    lists = value.values() if isinstance(value, dict) else [] if value is None else [value]
    return all(isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids) for ids in lists)


def rows_of_peft(
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    config: ModelConfig,
    architecture: Architecture,
    path: Path,
) -> Iterator[tuple[str, str, Rows]]:
    """Yield the names in the file and here of tables with trained rows, and these. Raise UserError for rows that the
    model does not have."""
    given = settings.get(INDICES)
    for name in (config.table_name, *([] if config.tied else [config.output_name])):
        module = _module(name, config, architecture)
        key = f"{OUTER}{module}.{DELTA}"
        if key not in tensors:
            continue
        named = given if isinstance(given, dict) else {module: given}
        ids = next((ids for end, ids in named.items() if module == end or module.endswith(f".{end}")), None) or []
        rows = tensors[key]
        check_stored(key, rows.dtype, path)
        if rows.shape != (len(set(ids)), config.hidden_size) or len(set(ids)) < len(ids):
            raise UserError(
                f"{path} has {shown_name(key)} of shape {shown(list(rows.shape))} for {len(set(ids))} tokens and rows "
                f"of {config.hidden_size}; give the adapter as it was saved"
            )
        if max(ids, default=0) >= config.vocab_size:
            raise UserError(
                f"{path} has a row for token {max(ids)}, and the model {config.vocab_size} tokens; give the base with "
                f"its rows, saved after model.resize_token_embeddings({max(ids) + 1})"
            )
        yield key, name, Rows(torch.tensor(ids, dtype=torch.int64), rows.float())


def _module(name: str, config: ModelConfig, architecture: Architecture) -> str:
    """Return what transformers calls the module of a table."""
    (plain,) = architecture.stored_names(name, config)
    return ("" if name == config.output_name else architecture.prefix) + plain.removesuffix(".weight")


def rows_for_peft(adapter: SavedAdapter, architecture: Architecture) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors of new rows by the names of peft's file, and what its settings say of them."""
    config, ids = adapter.config, ids_of(adapter.checkpoint)
    tensors: dict[str, Tensor] = {}
    indices: dict[str, list[int]] = {}
    for name in (config.table_name, *([] if config.tied else [config.output_name])) if ids else ():
        (plain,) = architecture.stored_names(name, config)
        tensors[f"{OUTER}{_module(name, config, architecture)}.{DELTA}"] = saved_rows(adapter.checkpoint, name)
        indices[plain.removesuffix(".weight")] = list(ids)
    if ids:
        say(f"the base needs {config.vocab_size} rows: model.resize_token_embeddings({config.vocab_size})")
    return tensors, {INDICES: indices} if ids else {}

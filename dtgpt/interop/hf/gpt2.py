"""What is common to all formats with GPT-2's own names and order.

OpenAI's release, and after it nanoGPT, Hugging Face and llm.c, keep the fused QKV as `[3, N, D]` along its output, name
blocks `h.0`, and pad the token table as they like.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from dtgpt.models.gpt2 import TABLE, GPT2Config
from dtgpt.models.source import Part, cut, pad_rows, parameter_shapes
from dtgpt.util.errors import UserError, shown, shown_name

THEIR_NAMES = {
    "embedding.": "", "head.": "", "blocks.": "h.", "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj",
    "mlp.fc": "mlp.c_fc", "mlp.proj": "mlp.c_proj",
}  # fmt: skip

Shapes = Mapping[str, tuple[int, ...]]


def gpt2_name(name: str) -> str:
    """Return GPT-2's name of dtgpt's parameter `name`, without the prefix `transformer.`."""
    for ours, theirs in THEIR_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def is_matrix(name: str) -> bool:
    """Return whether dtgpt's parameter `name` is the weight of a linear map, `[out, in]`."""
    return name.endswith(".weight") and (".attn." in name or ".mlp." in name)


def from_gpt2(stored: Tensor, name: str, config: GPT2Config, part: Part | None) -> Tensor:
    """Return dtgpt's parameter `name`, or a part of it, in fp32 and memory of its own. `stored`: GPT-2's tensor, where
    a matrix is `[out, in]`; it may be mapped from a file."""
    whole = stored
    if ".attn.qkv." in name:
        whole = rearrange(stored, "(three n d) ... -> (n three d) ...", three=3, n=config.num_heads)
    elif name == TABLE:
        whole = pad_rows(stored, config)
    piece = cut(whole, part)
    if part is None and whole.untyped_storage().data_ptr() != stored.untyped_storage().data_ptr():
        return piece.float().contiguous()  # copied already
    return torch.empty(piece.shape, dtype=torch.float32, device="cpu").copy_(piece)


def gpt2_shapes(config: GPT2Config, found: Shapes, place: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes that GPT-2's tensors must have, by dtgpt's names: the table without padding, matrices `[out,
    in]`. Raise UserError where `found`, by GPT-2's names, has another number of blocks, before a model of that size is
    laid out."""
    blocks = {match[1] for name in found if (match := re.match(r"h\.(\d+)\.", name))}
    if len(blocks) != config.num_layers:
        raise UserError(
            f"{place} is a model of {shown(config.num_layers)} blocks by its configuration, but holds {len(blocks)}; "
            "give a complete model"
        )
    return {**parameter_shapes(config), TABLE: (config.vocab_size, config.hidden_size)}


def check_tensors(found: Shapes, expected: Shapes, place: Path) -> None:
    """Raise UserError for a tensor that is missing, has another shape or is unknown. Both mappings have GPT-2's
    names."""
    for name, shape in expected.items():
        if name not in found:
            raise UserError(f"{place} has no tensor {name}, which must be {list(shape)}; give a complete model")
        if tuple(found[name]) != shape:
            raise UserError(
                f"{place} has {name} of shape {shown(list(found[name]))} where its configuration asks for "
                f"{list(shape)}; give weights and configuration of the same model"
            )
    unknown = sorted(found.keys() - expected.keys())
    if unknown:
        raise UserError(
            f"{place} holds {shown_name(unknown[0])}, which no GPT-2 language model has; give one without it"
        )


def untied(place: Path) -> UserError:
    return UserError(
        f"{place} has an output projection lm_head.weight that is not wte.weight, while dtgpt's model has one table "
        "for both; give a model with tied embeddings"
    )


def plain_names(names: Iterable[str], place: Path) -> dict[str, str]:
    """Return the name in the file by GPT-2's name. Wrappers add a prefix (torch.compile `_orig_mod.`). Old versions
    saved the causal mask too; it is left out. Raise UserError where one tensor has two names."""
    plain: dict[str, str] = {}
    for there in names:
        name = re.sub(r"^(_orig_mod\.)?(transformer\.)?", "", there)
        if re.fullmatch(r"h\.\d+\.attn\.(masked_)?bias", name):
            continue
        if name in plain:
            both = f"{shown_name(plain[name])} and {shown_name(there)}"
            raise UserError(f"{place} holds {shown_name(name)} twice, as {both}; give a model as it was saved")
        plain[name] = there
    return plain


def setting(settings: Mapping[str, Any], names: tuple[str, ...], default: int | None, place: Path) -> int:
    """Return the whole number under the first of `names` that is there. Raise UserError for another value."""
    value = next((settings[n] for n in names if settings.get(n) is not None), default)
    if type(value) is not int:
        raise UserError(
            f"{place} has {names[0]}={shown(value)}, which is not a whole number; give the file as it was written"
        )
    return value


def checked(config: GPT2Config, place: Path) -> GPT2Config:
    """Return `config`. Raise UserError, with the place, where no model has this shape."""
    try:
        config.validate()
    except UserError as error:
        raise UserError(f"{place} is not a model that dtgpt can hold: {error}") from None
    return config

"""LLaMA, Mistral and dense Qwen3 as transformers has them: names, layout and the fields of config.json.

transformers keeps q, k and v, and gate and up, as matrices `[out, in]` of their own. What transformers 4 and 5 say
differently of rotary positions stands in `rope.py`.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtgpt.interop.foreign import checked, epsilon, whole_number
from dtgpt.interop.hf.rope import read_rope, write_rope
from dtgpt.models.config import ModelConfig
from dtgpt.models.llama import LlamaConfig
from dtgpt.models.source import Part, cut
from dtgpt.util.errors import UserError, shown

PREFIX = "model."
BUFFERS = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # frequencies, which old versions saved too
NAMES = {
    "embedding.tokens": "embed_tokens", "blocks.": "layers.", "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm", "attn.proj": "attn.o_proj", "attn.": "self_attn.",
    "mlp.down": "mlp.down_proj", "head.norm": "norm", "head.output": "lm_head",
}  # fmt: skip
PACKED = {"attn.qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"), "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj")}
SILU = ("silu", "swish")
FULL, SLIDING = "full_attention", "sliding_attention"


class Family(NamedTuple):
    """What transformers takes where config.json of this model_type lacks a key."""

    kv_heads: int | None
    head_dim: int | None
    width: int
    positions: int
    vocabulary: int
    window: int | None = None


FAMILIES = {
    "llama": Family(None, None, 11008, 2048, 32000),
    "mistral": Family(8, None, 14336, 131072, 32000, window=4096),
    "qwen3": Family(32, 128, 22016, 32768, 151936, window=4096),
}


def stored_names(name: str) -> list[str]:
    """Return transformers' names of dtgpt's parameter `name`, without PREFIX."""
    packed = next((key for key in PACKED if f".{key}." in name), None)
    names = [name] if packed is None else [name.replace(packed, part) for part in PACKED[packed]]
    for ours, theirs in NAMES.items():
        names = [n.replace(ours, theirs) for n in names]
    return names


def from_stored(stored: list[Tensor], name: str, config: ModelConfig, part: Part | None) -> Tensor:
    """Return the elements `part` of dtgpt's parameter `name`. Of packed matrices only the groups of rows with these
    elements are looked at, since `stored` may be mapped from a file."""
    rows = _rows_of_group(name, config)
    if len(stored) == 1:
        return cut(stored[0], part)
    size, width = sum(rows), stored[0].shape[1]
    wanted, columns = part or (range(sum(map(len, stored))), range(width))
    first, last = wanted.start // size, math.ceil(wanted.stop / size)
    groups = [
        t[first * n : last * n, columns.start : columns.stop].unflatten(0, (-1, n))
        for t, n in zip(stored, rows, strict=True)
    ]
    return torch.cat(groups, dim=1).flatten(0, 1)[wanted.start - first * size : wanted.stop - first * size]


def to_stored(whole: Tensor, name: str, config: ModelConfig) -> list[Tensor]:
    """Return dtgpt's parameter `name` as transformers has it."""
    rows = _rows_of_group(name, config)
    if len(rows) == 1:
        return [whole]
    return [part.flatten(0, 1) for part in whole.unflatten(0, (-1, sum(rows))).split(rows, dim=1)]


def _rows_of_group(name: str, config: ModelConfig) -> list[int]:
    """Return how many rows of each stored matrix follow each other in dtgpt's: the heads of a group `[R + 2, D]`, or
    one row of gate and of up."""
    assert isinstance(config, LlamaConfig)
    if ".attn.qkv." in name:
        return [config.num_heads // config.num_kv_heads * config.head_dim, config.head_dim, config.head_dim]
    return [1, 1] if ".mlp.gate_up." in name else [1]


def read_config(settings: dict[str, Any], path: Path) -> LlamaConfig:
    """Return the shape that config.json describes, with transformers' defaults. Raise UserError for options that dtgpt
    does not have."""
    family = FAMILIES[settings["model_type"]]
    width = whole_number(settings, ("hidden_size",), 4096, path)
    heads = whole_number(settings, ("num_attention_heads",), 32, path)
    positions = whole_number(settings, ("max_position_embeddings",), family.positions, path)
    layers = whole_number(settings, ("num_hidden_layers",), 32, path)
    _check_options(settings, path)
    _check_window(settings, family, positions, layers, path)
    kv_heads = heads if "num_key_value_heads" in settings else family.kv_heads or heads  # null: as many as queries
    config = LlamaConfig(
        num_layers=layers,
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=whole_number(settings, ("num_key_value_heads",), kv_heads, path),
        head_dim=whole_number(settings, ("head_dim",), family.head_dim or width // max(heads, 1), path),
        ffn_hidden_size=whole_number(settings, ("intermediate_size",), family.width, path),
        seq_length=positions,
        vocab_size=whole_number(settings, ("vocab_size",), family.vocabulary, path),
        tied=settings.get("tie_word_embeddings", False),
        qk_norm=settings["model_type"] == "qwen3",
        norm_eps=epsilon(settings, ("rms_norm_eps",), 1e-6, path),
        **read_rope(settings, positions, path),
    )
    return checked(config, path)


def _check_options(settings: dict[str, Any], path: Path) -> None:
    """Raise UserError for an option that dtgpt does not have."""
    rules: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
        "hidden_act": ("silu", lambda v: v in SILU, f"dtgpt has {' and '.join(SILU)}"),
        "attention_bias": (False, lambda v: not v, "the attention of dtgpt's LLaMA has no biases"),
        "mlp_bias": (False, lambda v: not v, "the MLP of dtgpt's LLaMA has no biases"),
        "tie_word_embeddings": (False, lambda v: isinstance(v, bool), "the key is true or false"),
        "quantization_config": (None, lambda v: v is None, "dtgpt reads weights in F32, F16 and BF16"),
    }
    for name, (default, fits, reason) in rules.items():
        value = settings.get(name, default)
        if not fits(value):
            raise UserError(f"{path} has {name}={shown(value)}; {reason}: give another model")


def _check_window(settings: dict[str, Any], family: Family, positions: int, layers: int, path: Path) -> None:
    """Raise UserError where a layer attends to fewer than all `positions`: a window of W admits the last W tokens."""
    kinds = settings.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(kind in (FULL, SLIDING) for kind in kinds)):
        raise UserError(f"{path} has layer_types={shown(kinds)}; dtgpt's layers all have {FULL}: give another model")
    slides = SLIDING in (kinds or ())
    window = settings.get("sliding_window", family.window)
    if family is FAMILIES["qwen3"]:
        used = settings.get("use_sliding_window", False)
        if type(used) is not bool:
            raise UserError(f"{path} has use_sliding_window={shown(used)}; the key is true or false: correct it")
        slides = slides or (kinds is None and layers > whole_number(settings, ("max_window_layers",), 28, path))
        window = window if used and slides else None
    if window is None:
        return
    if whole_number({"sliding_window": window}, ("sliding_window",), None, path) < positions:
        absent = "" if "sliding_window" in settings else ", by default"
        raise UserError(
            f"{path} has sliding_window={shown(window)}{absent}, and dtgpt's attention has no window; write "
            f"max_position_embeddings={shown(window)} there to use the model up to that length, or give another model"
        )


def write_config(config: LlamaConfig) -> dict[str, Any]:
    """Return the fields of config.json, of the family whose class has what `config` asks for: norms of heads are
    Qwen3's, and transformers' Llama refuses a width that its heads do not divide, which Mistral takes."""
    kind, name = "llama", "LlamaForCausalLM"
    own: dict[str, Any] = {"attention_bias": False, "mlp_bias": False}
    if config.qk_norm:
        kind, name = "qwen3", "Qwen3ForCausalLM"
        own = {"attention_bias": False, "use_sliding_window": False, "sliding_window": None}
    elif config.hidden_size % config.num_heads:
        kind, name = "mistral", "MistralForCausalLM"
        own = {"sliding_window": None}
    return {
        "architectures": [name], "model_type": kind, "hidden_act": "silu", "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size, "intermediate_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.seq_length, "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps, "initializer_range": min(config.init_std, 1.0),
        "attention_dropout": config.dropout, "tie_word_embeddings": config.tied, **own, **write_rope(config),
    }  # fmt: skip

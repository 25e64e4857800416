"""LLaMA, Mistral, Ministral, Qwen2.5 and dense Qwen3 as transformers has them: names, layout and the fields of
config.json.

transformers keeps q, k and v, and gate and up, as matrices `[out, in]` of their own. What transformers 4 and 5 say
differently of rotary positions stands in `rope.py`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from dtgpt.interop.foreign import Rules, check_rules, checked, epsilon, shortest_pattern, whole_number
from dtgpt.interop.hf.activation import read_activation, write_activation
from dtgpt.interop.hf.groups import joined, separated
from dtgpt.interop.hf.rope import FULL, SLIDING, read_rope, write_rope
from dtgpt.models.config import LARGEST_SIZE, ModelConfig
from dtgpt.models.llama import LlamaConfig
from dtgpt.models.rotary import LOCAL, MOST_KINDS, RotaryConfig, WindowConfig
from dtgpt.models.source import Part
from dtgpt.util.errors import UserError, shown

PREFIX = "model."
BUFFERS = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # frequencies, which old versions saved too
NAMES = {
    "embedding.tokens": "embed_tokens", "blocks.": "layers.", "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm", "attn.proj": "attn.o_proj", "attn.": "self_attn.",
    "mlp.down": "mlp.down_proj", "head.norm": "norm", "head.output": "lm_head",
}  # fmt: skip
PACKED = {"attn.qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"), "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj")}


class Family(NamedTuple):
    """What transformers takes where config.json of this model_type lacks a key."""

    kv_heads: int | None
    head_dim: int | None
    width: int
    positions: int
    vocabulary: int
    window: int | None = None
    eps: float = 1e-6
    # Layers with the window: none, whatever `sliding_window` says; all; those of `layer_types`, or all where it is
    # missing; those of `layer_types` or from `max_window_layers` on, if `use_sliding_window` says so.
    windows: Literal["none", "all", "typed", "switched"] = "none"
    biases: Literal["none", "qkv"] = "none"  # of attention, whatever config.json says
    hidden: int = 4096
    reads_biases: bool = False  # whether `attention_bias` asks for those of queries, keys, values and the output


FAMILIES = {
    "llama": Family(None, None, 11008, 2048, 32000, reads_biases=True),
    "mistral": Family(8, None, 14336, 131072, 32000, window=4096, windows="typed"),
    "ministral": Family(8, None, 14336, 131072, 32000, window=4096, windows="typed"),
    "qwen2": Family(32, None, 22016, 32768, 151936, window=4096, windows="switched", biases="qkv"),
    "qwen3": Family(32, 128, 22016, 32768, 151936, window=4096, windows="switched", reads_biases=True),
    "phi3": Family(None, None, 8192, 4096, 32064, windows="all", eps=1e-5, hidden=3072),
}


def stored_names(name: str, own: Mapping[str, str] = NAMES) -> list[str]:
    """Return transformers' names of dtgpt's parameter `name`, without PREFIX. own: the names of the family."""
    packed = next((key for key in PACKED if f".{key}." in name), None)
    names = [name] if packed is None else [name.replace(packed, part) for part in PACKED[packed]]
    for ours, theirs in own.items():
        names = [n.replace(ours, theirs) for n in names]
    return names


def from_stored(stored: list[Tensor], name: str, config: ModelConfig, part: Part | None) -> Tensor:
    """Return the elements `part` of dtgpt's parameter `name`."""
    return joined(stored, rows_of_group(name, config), part)


def to_stored(whole: Tensor, name: str, config: ModelConfig) -> list[Tensor]:
    """Return dtgpt's parameter `name` as transformers has it."""
    return separated(whole, rows_of_group(name, config))


def rows_of_group(name: str, config: ModelConfig) -> list[int]:
    """Return how many rows of each stored matrix follow each other in dtgpt's: the heads of a group `[R + 2, D]`, or
    one row of gate and of up."""
    assert isinstance(config, RotaryConfig)
    if ".attn.qkv." in name:
        return [config.num_heads // config.num_kv_heads * config.head_dim, config.head_dim, config.head_dim]
    return [1, 1] if ".mlp.gate_up." in name else [1]


def read_config(settings: dict[str, Any], path: Path) -> LlamaConfig:
    """Return the shape that config.json describes, with transformers' defaults. Raise UserError for options that dtgpt
    does not have."""
    family = FAMILIES[settings["model_type"]]
    width = whole_number(settings, ("hidden_size",), family.hidden, path)
    heads = whole_number(settings, ("num_attention_heads",), 32, path)
    positions = whole_number(settings, ("max_position_embeddings",), family.positions, path)
    layers = whole_number(settings, ("num_hidden_layers",), 32, path)
    _check_options(settings, family, path)
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
        activation=read_activation(settings, "hidden_act", "silu", path),
        qk_norm=settings["model_type"] == "qwen3",
        attention_bias="all" if family.reads_biases and settings.get("attention_bias") else family.biases,
        norm_eps=epsilon(settings, ("rms_norm_eps",), family.eps, path),
        **read_window(settings, family, layers, path),
        **read_rope(settings, positions, path),
    )
    return checked(config, path)


def _check_options(settings: dict[str, Any], family: Family, path: Path) -> None:
    """Raise UserError for an option that dtgpt does not have."""
    rules: Rules = {
        "attention_bias": (
            False,
            lambda v: not v or (v is True and family.reads_biases),
            "this family has none",
        ),
        "mlp_bias": (False, lambda v: not v, "the MLP of dtgpt's LLaMA has no biases"),
        "tie_word_embeddings": (False, lambda v: isinstance(v, bool), "the key is true or false"),
    }
    check_rules(settings, rules, path)


def read_window(settings: dict[str, Any], family: Family, layers: int, path: Path) -> dict[str, Any]:
    """Return the fields of `WindowConfig`: a window of W admits the last W tokens. One of as many tokens as the
    model has positions hides nothing until it has more; one of more than any model can have is left out."""
    kinds = asked = read_kinds(settings, layers, path)
    window = settings.get("sliding_window", family.window) if family.windows != "none" else None
    if family.windows == "switched":
        used = settings.get("use_sliding_window", False)
        if type(used) is not bool:
            raise UserError(f"{path} has use_sliding_window={shown(used)}; the key is true or false: correct it")
        if kinds is None:
            last = whole_number(settings, ("max_window_layers",), 28, path)
            kinds = [layer >= last for layer in range(min(layers, MOST_KINDS))]
        window = window if used else None
    if window is None and any(asked or []):
        raise UserError(
            f"{path} has {SLIDING} in layer_types, and no window ({_why_no_window(settings, family)}), so that "
            f"transformers cannot run it; give the model's window there, or {FULL} for all layers"
        )
    pattern = LOCAL if kinds is None or family.windows == "all" else shortest_pattern(kinds)
    if window is None or LOCAL not in pattern:
        return {}
    size = whole_number({"sliding_window": window}, ("sliding_window",), None, path)
    if size < 1 or (layers > MOST_KINDS and pattern != LOCAL):
        raise UserError(f"{path} has sliding_window={size} and num_hidden_layers={layers}; give another model")
    return {} if size > LARGEST_SIZE else {"window": size, "window_pattern": pattern}


def _why_no_window(settings: dict[str, Any], family: Family) -> str:
    if family.windows == "none":
        return f"model_type={settings['model_type']} has none"
    if family.windows == "switched" and not settings.get("use_sliding_window", False):
        return "use_sliding_window is not true"
    return "sliding_window is null"


def read_kinds(settings: dict[str, Any], layers: int, path: Path) -> list[bool] | None:
    """Return whether each layer has a window, as `layer_types` says; None where it says nothing."""
    kinds = settings.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or not all(kind in (FULL, SLIDING) for kind in kinds):
        raise UserError(f"{path} has layer_types={shown(kinds)}; dtgpt has {FULL} and {SLIDING}: give another model")
    if len(kinds) != layers:
        raise UserError(
            f"{path} has layer_types of {len(kinds)} layers and num_hidden_layers={layers}; give the file as it was "
            "written"
        )
    return [kind == SLIDING for kind in kinds]


def read_pattern(settings: dict[str, Any], layers: int, window: int, pattern: str, path: Path) -> dict[str, Any]:
    """Return the fields of `WindowConfig` of a family whose layers with a window differ from others in their positions,
    too. window, pattern: its defaults."""
    kinds = read_kinds(settings, layers, path)
    pattern = pattern if kinds is None else shortest_pattern(kinds)
    size = settings.get("sliding_window", window)
    if size is None and LOCAL not in pattern:
        size = 0
    elif type(size) is not int or size < 1:
        raise UserError(f"{path} has sliding_window={shown(size)}; it must be a whole number of 1 or more")
    return {"window": size, "window_pattern": pattern}


def write_pattern(config: WindowConfig) -> dict[str, Any]:
    """Return the keys that `read_pattern` reads. transformers asks for a window that no layer uses, too."""
    return {"sliding_window": config.window or config.seq_length, "layer_types": write_kinds(config)}


def write_kinds(config: WindowConfig) -> list[str]:
    """Return `layer_types` of config.json."""
    return [SLIDING if config.is_local(layer) else FULL for layer in range(config.num_layers)]


def write_config(config: LlamaConfig) -> dict[str, Any]:
    """Return the fields of config.json, of the family whose class has what `config` asks for: norms of heads are
    Qwen3's, biases of queries, keys and values alone Qwen2's, and transformers' Llama refuses a width that its heads do
    not divide, which Mistral takes, and Ministral where some layers have a window. Raise UserError where no class has
    all of it."""
    kinds = [config.is_local(layer) for layer in range(config.num_layers)]
    window = config.window if any(kinds) else None
    by_layer = {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": write_kinds(config)}
    own: dict[str, Any] = {"attention_bias": config.attention_bias == "all", "mlp_bias": False}
    if config.qk_norm and config.attention_bias != "qkv":
        kind, name, own = "qwen3", "Qwen3ForCausalLM", {"attention_bias": own["attention_bias"], **by_layer}
    elif config.attention_bias == "qkv" and not config.qk_norm:
        kind, name, own = "qwen2", "Qwen2ForCausalLM", by_layer
    elif not config.qk_norm and window is None and config.hidden_size % config.num_heads == 0:
        kind, name = "llama", "LlamaForCausalLM"
    elif config.attention_bias == "none" and not config.qk_norm and (window is None or all(kinds)):
        kind, name, own = "mistral", "MistralForCausalLM", {"sliding_window": window}
    elif config.attention_bias == "none" and not config.qk_norm:
        own = {"sliding_window": window, "layer_types": write_kinds(config)}
        kind, name = "ministral", "MinistralForCausalLM"
    else:
        raise UserError(
            f"no class of transformers has model.qk_norm={config.qk_norm}, model.attention_bias="
            f"{config.attention_bias}, model.window={window or 0} and model.hidden_size={config.hidden_size} of "
            f"{config.num_heads} heads together; keep the model as a checkpoint of dtgpt"
        )
    return {
        "architectures": [name], "model_type": kind, **shape_of(config),
        "hidden_act": write_activation(config.activation), **own, **write_rope(config),
    }  # fmt: skip


def shape_of(config: RotaryConfig) -> dict[str, Any]:
    """Return what families with rotary positions, grouped queries and a gated MLP call alike."""
    return {
        "num_hidden_layers": config.num_layers, "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "max_position_embeddings": config.seq_length, "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps, "initializer_range": min(config.init_std, 1.0),
        "attention_dropout": config.dropout, "tie_word_embeddings": config.tied,
    }  # fmt: skip

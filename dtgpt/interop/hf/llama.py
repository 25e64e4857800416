"""LLaMA, Mistral, Ministral, Qwen2.5 and dense Qwen3 as transformers has them: names, layout and the fields of
config.json; and what later families share with them.

transformers keeps q, k and v, and gate and up, as matrices `[out, in]` of their own. What transformers 4 and 5 say
differently of rotary positions stands in `rope.py`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from dtgpt.interop.foreign import checked, shortest_pattern
from dtgpt.interop.hf.architecture import Architecture, read_activation, write_activation
from dtgpt.interop.hf.rope import FULL, SLIDING, read_rope, write_rope
from dtgpt.interop.keys import (
    EPSILON,
    FLAG,
    POSITIVE,
    WHOLE,
    Key,
    check_keys,
    is_flag,
    is_off,
    not_here,
    read_key,
    whole_number,
)
from dtgpt.models.config import LARGEST_SIZE
from dtgpt.models.llama import LlamaConfig
from dtgpt.models.rotary import LOCAL, MOST_KINDS, RotaryConfig, WindowConfig
from dtgpt.util.errors import UserError

Windows = Literal["none", "all", "typed", "switched"]
TIED = Key(is_flag, not_here("the key is true or false"), False)


class Family(NamedTuple):
    """What transformers takes where config.json of this model_type lacks a key."""

    kv_heads: int | None  # None: as many as heads
    head_dim: int | None  # None: the width over the heads
    width: int  # of the MLP
    positions: int
    vocabulary: int
    window: int | None = None
    eps: float = 1e-6
    # Layers with the window: none, whatever `sliding_window` says; all; those of `layer_types`, or all where it is
    # missing; those of `layer_types` or from `max_window_layers` on, if `use_sliding_window` says so.
    windows: Windows = "none"
    biases: Literal["none", "qkv"] = "none"  # of attention, whatever config.json says
    hidden: int = 4096
    reads_biases: bool = False  # whether `attention_bias` asks for those of queries, keys, values and the output
    layers: int = 32
    heads: int = 32
    tied: bool = False


FAMILIES = {
    "llama": Family(None, None, 11008, 2048, 32000, reads_biases=True),
    "mistral": Family(8, None, 14336, 131072, 32000, window=4096, windows="typed"),
    "ministral": Family(8, None, 14336, 131072, 32000, window=4096, windows="typed"),
    "qwen2": Family(32, None, 22016, 32768, 151936, window=4096, windows="switched", biases="qkv"),
    "qwen3": Family(32, 128, 22016, 32768, 151936, window=4096, windows="switched", reads_biases=True),
    "phi3": Family(None, None, 8192, 4096, 32064, windows="all", eps=1e-5, hidden=3072),
}


class LikeLlama(Architecture):
    """What families have in common whose queries, keys and values, and gate and up, are matrices of their own."""

    buffers = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # frequencies, which old versions saved
    names: ClassVar[Mapping[str, str]] = {
        "embedding.tokens": "embed_tokens",
        "blocks.": "layers.",
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
        "attn.proj": "attn.o_proj",
        "attn.": "self_attn.",
        "mlp.down": "mlp.down_proj",
        "head.norm": "norm",
        "head.output": "lm_head",
    }
    packed: ClassVar[Mapping[str, Sequence[str]]] = {
        "attn.qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    }

    def rows_of_group(self, name: str, config: RotaryConfig) -> list[int]:
        """Return the rows of the heads of a group `[R + 2, D]`, or one row of gate and of up."""
        if ".attn.qkv." in name:
            return [config.num_heads // config.num_kv_heads * config.head_dim, config.head_dim, config.head_dim]
        return [1, 1] if ".mlp.gate_up." in name else [1]


class Llama(LikeLlama):
    def read_config(self, settings: dict[str, Any], path: Path) -> LlamaConfig:
        kind = settings["model_type"]
        family = FAMILIES[kind]

        def is_bias(value: Any) -> bool:
            return not value or (value is True and family.reads_biases)

        keys = {
            "attention_bias": Key(is_bias, not_here("this family has none"), False),
            "mlp_bias": Key(is_off, not_here("the MLP of dtgpt's LLaMA has no biases"), False),
            "tie_word_embeddings": TIED,
        }
        check_keys(settings, keys, path)
        shape = read_shape(settings, family, path)
        config = LlamaConfig(
            activation=read_activation(settings, "hidden_act", "silu", path),
            qk_norm=kind == "qwen3",
            attention_bias="all" if family.reads_biases and settings.get("attention_bias") else family.biases,
            **shape,
            **read_window(settings, family, shape["num_layers"], path),
            **read_rope(settings, shape["seq_length"], path),
        )
        return checked(config, path)

    def write_config(self, config: LlamaConfig) -> dict[str, Any]:
        """Return the fields of config.json, of the family whose class has what `config` asks for: norms of heads are
        Qwen3's, biases of queries, keys and values alone Qwen2's, and transformers' Llama refuses a width that its
        heads do not divide, which Mistral takes, and Ministral where some layers have a window. Raise UserError where
        no class has all of it."""
        kinds = [config.is_local(layer) for layer in range(config.num_layers)]
        window = config.window if any(kinds) else None
        by_layer = {"sliding_window": window, "layer_types": write_kinds(config)}
        biases = {"attention_bias": config.attention_bias == "all"}
        is_plain = config.attention_bias == "none" and not config.qk_norm
        if config.qk_norm and config.attention_bias != "qkv":
            name, own = "Qwen3", {"use_sliding_window": window is not None, **by_layer, **biases}
        elif config.attention_bias == "qkv" and not config.qk_norm:
            name, own = "Qwen2", {"use_sliding_window": window is not None, **by_layer}
        elif not config.qk_norm and window is None and config.hidden_size % config.num_heads == 0:
            name, own = "Llama", {"mlp_bias": False, **biases}
        elif is_plain and (window is None or all(kinds)):
            name, own = "Mistral", {"sliding_window": window}
        elif is_plain:
            name, own = "Ministral", by_layer
        else:
            raise UserError(
                f"no class of transformers has model.qk_norm={config.qk_norm}, model.attention_bias="
                f"{config.attention_bias}, model.window={window or 0} and model.hidden_size={config.hidden_size} of "
                f"{config.num_heads} heads together; keep the model as a checkpoint of dtgpt"
            )
        return {
            "architectures": [f"{name}ForCausalLM"],
            "model_type": name.lower(),
            **write_shape(config),
            "hidden_act": write_activation(config.activation),
            **own,
            **write_rope(config),
        }


LLAMA = Llama()


def read_shape(settings: dict[str, Any], family: Family, path: Path) -> dict[str, Any]:
    """Return the fields of `RotaryConfig` that all families with rotary positions, grouped queries and a gated MLP call
    alike. transformers takes the family's own number of key-value heads, or columns of a head, where the key is
    missing, and what follows from the others where it is null."""

    def number(name: str, default: int | None) -> int:
        return whole_number(settings, (name,), default, path)

    width, heads = number("hidden_size", family.hidden), number("num_attention_heads", family.heads)
    columns = width // max(heads, 1)
    return {
        "num_layers": number("num_hidden_layers", family.layers),
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": number(
            "num_key_value_heads", heads if "num_key_value_heads" in settings else family.kv_heads or heads
        ),
        "head_dim": number("head_dim", columns if "head_dim" in settings else family.head_dim or columns),
        "ffn_hidden_size": number("intermediate_size", family.width),
        "seq_length": number("max_position_embeddings", family.positions),
        "vocab_size": number("vocab_size", family.vocabulary),
        "tied": settings.get("tie_word_embeddings", family.tied),
        "norm_eps": read_key(settings, ("rms_norm_eps",), EPSILON, path, family.eps),
    }


def write_shape(config: RotaryConfig) -> dict[str, Any]:
    """Return the keys that `read_shape` reads, and those of training."""
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.seq_length,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": min(config.init_std, 1.0),
        "attention_dropout": config.dropout,
        "tie_word_embeddings": config.tied,
    }


def read_window(settings: dict[str, Any], family: Family, layers: int, path: Path) -> dict[str, Any]:
    """Return the fields of `WindowConfig`: a window of W admits the last W tokens. One of as many tokens as the
    model has positions hides nothing until it has more; one of more than any model can have is left out."""
    kinds = asked = read_kinds(settings, layers, path)
    window = settings.get("sliding_window", family.window) if family.windows != "none" else None
    if family.windows == "switched":
        check_keys(settings, {"use_sliding_window": FLAG._replace(default=False)}, path)
        if kinds is None:
            last = whole_number(settings, ("max_window_layers",), 28, path)
            kinds = [layer >= last for layer in range(min(layers, MOST_KINDS))]
        window = window if settings.get("use_sliding_window", False) else None
    if window is None and any(asked or []):
        raise UserError(
            f"{path} has {SLIDING} in layer_types, and no window ({_why_no_window(settings, family)}), so that "
            f"transformers cannot run it; give the model's window there, or {FULL} for all layers"
        )
    pattern = LOCAL if kinds is None or family.windows == "all" else shortest_pattern(kinds)
    if window is None or LOCAL not in pattern:
        return {}
    size = read_key({"sliding_window": window}, ("sliding_window",), WHOLE, path)
    if size < 1 or (layers > MOST_KINDS and pattern != LOCAL):
        raise UserError(f"{path} has sliding_window={size} and num_hidden_layers={layers}; give another model")
    return {} if size > LARGEST_SIZE else {"window": size, "window_pattern": pattern}


def _why_no_window(settings: dict[str, Any], family: Family) -> str:
    if family.windows == "none":
        return f"model_type={settings['model_type']} has none"
    if family.windows == "switched" and not settings.get("use_sliding_window", False):
        return "use_sliding_window is not true"
    return "sliding_window is null"


def _are_kinds(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(kind in (FULL, SLIDING) for kind in value))


KINDS = {"layer_types": Key(_are_kinds, not_here(f"dtgpt has {FULL} and {SLIDING}"))}


def read_kinds(settings: dict[str, Any], layers: int, path: Path) -> list[bool] | None:
    """Return whether each layer has a window, as `layer_types` says; None where it says nothing."""
    check_keys(settings, KINDS, path)
    kinds = settings.get("layer_types")
    if kinds is None:
        return None
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
    unused = size is None and LOCAL not in pattern
    return {
        "window": 0 if unused else read_key({}, ("sliding_window",), POSITIVE, path, size),
        "window_pattern": pattern,
    }


def write_pattern(config: WindowConfig) -> dict[str, Any]:
    """Return the keys that `read_pattern` reads. transformers asks for a window that no layer uses, too."""
    return {"sliding_window": config.window or config.seq_length, "layer_types": write_kinds(config)}


def write_kinds(config: WindowConfig) -> list[str]:
    """Return `layer_types` of config.json."""
    return [SLIDING if config.is_local(layer) else FULL for layer in range(config.num_layers)]

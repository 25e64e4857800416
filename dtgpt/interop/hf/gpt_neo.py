"""GPT-Neo as transformers has it: names, layout and the fields of config.json. Its matrices lie `[out, in]`."""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from dtgpt.interop.foreign import Rules, check_names, check_rules, checked, epsilon, shortest_pattern, whole_number
from dtgpt.interop.hf.activation import read_activation, write_activation
from dtgpt.interop.hf.groups import joined, separated
from dtgpt.models.config import ModelConfig
from dtgpt.models.families.gpt_neo import GPTNeoConfig
from dtgpt.models.rotary import MOST_KINDS
from dtgpt.models.source import Part
from dtgpt.util.errors import UserError, shown

PREFIX = "transformer."
BUFFERS = re.compile(r"h\.\d+\.attn\.attention\.(masked_)?bias")  # the causal mask, which old versions saved too
NAMES = {
    "blocks.": "h.", "attn.proj": "attn.out_proj", "attn.": "attn.attention.",
    "mlp.fc": "mlp.c_fc", "mlp.proj": "mlp.c_proj",
}  # fmt: skip
PARTS = ("q_proj", "k_proj", "v_proj")
KINDS = ("global", "local")
ALIASES = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}  # transformers' names of one number


def stored_names(name: str) -> list[str]:
    """Return transformers' names of dtgpt's parameter `name`, without PREFIX."""
    name = name.removeprefix("embedding.").removeprefix("head.")
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return [name.replace("qkv", part) for part in PARTS] if ".qkv." in name else [name]


def from_stored(stored: list[Tensor], name: str, config: ModelConfig, part: Part | None) -> Tensor:
    """Return the elements `part` of dtgpt's parameter `name`."""
    return joined(stored, [config.head_dim] * len(stored), part)


def to_stored(whole: Tensor, name: str, config: ModelConfig) -> list[Tensor]:
    """Return dtgpt's parameter `name` as transformers has it."""
    return separated(whole, [config.head_dim] * len(stored_names(name)))


def read_config(settings: dict[str, Any], path: Path) -> GPTNeoConfig:
    """Return the shape that config.json describes, with transformers' defaults. Raise UserError for options that dtgpt
    does not have."""
    width = whole_number(settings, ("hidden_size",), 2048, path)
    inner = f"the MLP of dtgpt's GPT-Neo is 4 hidden_size = {4 * width} wide"
    rules: Rules = {
        "intermediate_size": (None, lambda v: v in (None, 4 * width), inner),
        "tie_word_embeddings": (
            True,
            lambda v: v is True,
            "the output projection of dtgpt's GPT-Neo is the token table",
        ),
    }
    check_rules(settings, rules, path)
    check_names(settings, ALIASES, path)
    layers = whole_number(settings, ("num_layers", "num_hidden_layers"), 24, path)
    config = GPTNeoConfig(
        num_layers=layers,
        hidden_size=width,
        num_heads=whole_number(settings, ("num_heads", "num_attention_heads"), 16, path),
        seq_length=whole_number(settings, ("max_position_embeddings",), 2048, path),
        vocab_size=whole_number(settings, ("vocab_size",), 50257, path),
        layer_norm_eps=epsilon(settings, ("layer_norm_epsilon",), 1e-5, path),
        activation=read_activation(settings, "activation_function", "gelu_new", path, gated=False),
        window=whole_number(settings, ("window_size",), 256, path),
        window_pattern=_read_pattern(settings, layers, path),
    )
    if config.window < 1:
        raise UserError(f"{path} has window_size={config.window}; it must be 1 or more")
    return checked(config, path)


def _read_pattern(settings: dict[str, Any], layers: int, path: Path) -> str:
    """Return the pattern of `attention_types`, a list of [kinds, how often they are repeated], or of its long form
    `attention_layers`, which transformers saves beside it and takes if it is there."""
    name = "attention_types" if settings.get("attention_layers") is None else "attention_layers"
    given, local = settings.get(name), []
    pairs: Any = [[KINDS, 12]] if given is None else given if name == "attention_types" else [[given, 1]]
    try:
        for kinds, times in pairs:
            if type(times) is not int or not 0 <= times <= MOST_KINDS or not all(kind in KINDS for kind in kinds):
                raise ValueError
            local += [kind == KINDS[1] for kind in kinds] * times
    except (TypeError, ValueError):
        known = {"attention_types": "[[['global', 'local'], 12]]", "attention_layers": "['global', 'local']"}[name]
        raise UserError(f"{path} has {name}={shown(given)}; dtgpt reads a list such as {known}") from None
    if len(local) != layers:
        raise UserError(f"{path} has {name} of {len(local)} layers and num_layers={layers}; give the file as it was")
    return shortest_pattern(local)


def write_config(config: GPTNeoConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
    layers = [KINDS[config.is_local(layer)] for layer in range(config.num_layers)]
    return {
        "architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo",
        "activation_function": write_activation(config.activation, "gelu_new"), "num_layers": config.num_layers,
        "hidden_size": config.hidden_size, "num_heads": config.num_heads, "intermediate_size": None,
        "max_position_embeddings": config.seq_length, "vocab_size": config.vocab_size,
        "layer_norm_epsilon": config.layer_norm_eps, "initializer_range": config.init_std,
        "attention_types": [[[kind], 1] for kind in layers], "attention_layers": layers,
        "window_size": config.window or config.seq_length, "resid_dropout": config.dropout,
        "embed_dropout": config.dropout, "attention_dropout": config.dropout, "tie_word_embeddings": True,
    }  # fmt: skip

"""OLMo 3 as transformers has it: names and the fields of config.json; the layout is that of LLaMA."""

import re
from pathlib import Path
from typing import Any

from dtgpt.interop.foreign import Rules, check_rules, checked, epsilon, whole_number
from dtgpt.interop.hf import llama
from dtgpt.interop.hf.activation import read_activation, write_activation
from dtgpt.interop.hf.llama import PREFIX, from_stored, to_stored
from dtgpt.interop.hf.rope import FULL, SLIDING, read_rope_of_kinds, write_rope_of_kinds
from dtgpt.models.families.olmo3 import Olmo3Config
from dtgpt.util.errors import UserError

__all__ = ["BUFFERS", "PREFIX", "from_stored", "read_config", "stored_names", "to_stored", "write_config"]
BUFFERS = re.compile(r"rotary_emb\.\w+")
NAMES = {
    **llama.NAMES, "norm_1": "post_attention_layernorm", "norm_2": "post_feedforward_layernorm",
}  # fmt: skip
THETA = {FULL: 500000.0, SLIDING: 500000.0}


def stored_names(name: str) -> list[str]:
    """Return transformers' names of dtgpt's parameter `name`, without PREFIX."""
    return llama.stored_names(name, NAMES)


def read_config(settings: dict[str, Any], path: Path) -> Olmo3Config:
    """Return the shape that config.json describes, with transformers' defaults. Raise UserError for options that dtgpt
    does not have."""
    rules: Rules = {
        "attention_bias": (False, lambda v: not v, "the attention of dtgpt's OLMo 3 has no biases"),
        "tie_word_embeddings": (False, lambda v: isinstance(v, bool), "the key is true or false"),
    }
    check_rules(settings, rules, path)
    width = whole_number(settings, ("hidden_size",), 4096, path)
    heads = whole_number(settings, ("num_attention_heads",), 32, path)
    layers = whole_number(settings, ("num_hidden_layers",), 32, path)
    positions = whole_number(settings, ("max_position_embeddings",), 2048, path)
    full, sliding = read_rope_of_kinds(settings, positions, path, THETA, "rope_theta")
    own = ((settings.get("rope_parameters") or {}).get(SLIDING) or {}).get("rope_theta")
    theta = sliding["rope_theta"] if own else THETA[SLIDING]  # as transformers 5 takes it, whatever rope_theta says
    if full["rope_theta"] != theta:
        raise UserError(
            f"{path} has rope_theta={full['rope_theta']} of {FULL} and {theta} of {SLIDING}; dtgpt has one for "
            "both: give another model"
        )
    config = Olmo3Config(
        num_layers=layers,
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=whole_number(settings, ("num_key_value_heads",), heads, path),
        head_dim=whole_number(settings, ("head_dim",), width // max(heads, 1), path),
        ffn_hidden_size=whole_number(settings, ("intermediate_size",), 11008, path),
        seq_length=positions,
        vocab_size=whole_number(settings, ("vocab_size",), 50304, path),
        tied=settings.get("tie_word_embeddings", False),
        activation=read_activation(settings, "hidden_act", "silu", path),
        norm_eps=epsilon(settings, ("rms_norm_eps",), 1e-5, path),
        **llama.read_pattern(settings, layers, 4096, "LLLG", path),
        **full,
    )
    return checked(config, path)


def write_config(config: Olmo3Config) -> dict[str, Any]:
    """Return the fields of config.json."""
    return {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", **llama.shape_of(config),
        "hidden_act": write_activation(config.activation), "attention_bias": False,
        **llama.write_pattern(config), **write_rope_of_kinds(config, config.rope_theta, "rope_theta"),
    }  # fmt: skip

"""Gemma 3's text models as transformers has them: names and the fields of config.json; the layout is that of LLaMA."""

import re
from pathlib import Path
from typing import Any

from dtgpt.interop.foreign import Rules, check_rules, checked, epsilon, whole_number
from dtgpt.interop.hf import llama
from dtgpt.interop.hf.activation import read_activation, write_activation
from dtgpt.interop.hf.llama import PREFIX, from_stored, to_stored
from dtgpt.interop.hf.rope import FULL, SLIDING, read_rope_of_kinds, write_rope_of_kinds
from dtgpt.models.families.gemma3 import Gemma3Config
from dtgpt.models.rotary import MOST_KINDS
from dtgpt.util.errors import UserError

__all__ = ["BUFFERS", "PREFIX", "from_stored", "read_config", "stored_names", "to_stored", "write_config"]
BUFFERS = re.compile(r"rotary_emb(_local)?\.\w+|embed_tokens\.embed_scale")
NAMES = {
    **llama.NAMES, "norm_2": "pre_feedforward_layernorm", "after_1": "post_attention_layernorm",
    "after_2": "post_feedforward_layernorm",
}  # fmt: skip
THETA = {FULL: 1000000.0, SLIDING: 10000.0}
LOCAL_THETA = "rope_local_base_freq"


def stored_names(name: str) -> list[str]:
    """Return transformers' names of dtgpt's parameter `name`, without PREFIX."""
    return llama.stored_names(name, NAMES)


def read_config(settings: dict[str, Any], path: Path) -> Gemma3Config:
    """Return the shape that config.json describes, with transformers' defaults. Raise UserError for options that dtgpt
    does not have."""
    rules: Rules = {
        "attention_bias": (False, lambda v: not v, "the attention of dtgpt's Gemma 3 has no biases"),
        "final_logit_softcapping": (None, lambda v: v is None, "dtgpt's Gemma 3 does not cap its logits"),
        "attn_logit_softcapping": (None, lambda v: v is None, "dtgpt's Gemma 3 does not cap its scores"),
        "use_bidirectional_attention": (False, lambda v: not v, "dtgpt's attention is causal"),
        "tie_word_embeddings": (True, lambda v: isinstance(v, bool), "the key is true or false"),
    }
    check_rules(settings, rules, path)
    layers = whole_number(settings, ("num_hidden_layers",), 26, path)
    positions = whole_number(settings, ("max_position_embeddings",), 131072, path)
    full, sliding = read_rope_of_kinds(settings, positions, path, THETA, LOCAL_THETA)
    period = whole_number(settings, ("sliding_window_pattern",), 6, path)
    if not 1 <= period <= MOST_KINDS:
        raise UserError(f"{path} has sliding_window_pattern={period}; it must be between 1 and {MOST_KINDS}")
    config = Gemma3Config(
        num_layers=layers,
        hidden_size=whole_number(settings, ("hidden_size",), 2304, path),
        num_heads=whole_number(settings, ("num_attention_heads",), 8, path),
        num_kv_heads=whole_number(settings, ("num_key_value_heads",), 4, path),
        head_dim=whole_number(settings, ("head_dim",), 256, path),
        ffn_hidden_size=whole_number(settings, ("intermediate_size",), 9216, path),
        seq_length=positions,
        vocab_size=whole_number(settings, ("vocab_size",), 262208, path),
        tied=settings.get("tie_word_embeddings", True),
        activation=read_activation(settings, "hidden_activation", "gelu_pytorch_tanh", path),
        attention_scalar=whole_number(settings, ("query_pre_attn_scalar",), 256, path),
        norm_eps=epsilon(settings, ("rms_norm_eps",), 1e-6, path),
        rope_local_theta=sliding["rope_theta"],
        **llama.read_pattern(settings, layers, 4096, "L" * (period - 1) + "G", path),
        **full,
    )
    return checked(config, path)


def write_config(config: Gemma3Config) -> dict[str, Any]:
    """Return the fields of config.json. Raise UserError for a width that transformers does not take."""
    if config.hidden_size % config.num_heads:
        raise UserError(
            f"transformers takes a Gemma 3 whose heads divide its width, but this one has {config.hidden_size} and "
            f"{config.num_heads} heads; keep it as a checkpoint of dtgpt"
        )
    return {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **llama.shape_of(config),
        "hidden_activation": write_activation(config.activation), "attention_bias": False,
        "query_pre_attn_scalar": config.attention_scalar,
        "final_logit_softcapping": None, "attn_logit_softcapping": None, "use_bidirectional_attention": False,
        **llama.write_pattern(config), **write_rope_of_kinds(config, config.rope_local_theta, LOCAL_THETA),
    }  # fmt: skip

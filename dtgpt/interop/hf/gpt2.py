"""GPT-2 as transformers has it: names, layout and the fields of config.json.

OpenAI's release, and after it nanoGPT, Hugging Face and llm.c, keep the fused QKV as `[3, N, D]` along its output and
name blocks `h.0`. Hugging Face's matrices lie transposed, `[in, out]`, as OpenAI's.
"""

import re
from pathlib import Path
from typing import Any

from einops import rearrange
from torch import Tensor

from dtgpt.interop.foreign import Rules, check_names, check_rules, checked, epsilon, whole_number
from dtgpt.interop.hf.activation import read_activation, write_activation
from dtgpt.models.config import ModelConfig
from dtgpt.models.gpt2 import GPT2_124M, GPT2Config
from dtgpt.models.source import Part, cut

PREFIX = "transformer."
BUFFERS = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # the causal mask, which old versions saved too
NAMES = {
    "blocks.": "h.", "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj", "mlp.fc": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}  # fmt: skip
# transformers' names of one number: its own, and that of other families.
ALIASES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}  # fmt: skip


def stored_name(name: str) -> str:
    """Return GPT-2's name of dtgpt's parameter `name`, without PREFIX."""
    name = name.removeprefix("embedding.").removeprefix("head.")
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def stored_names(name: str) -> list[str]:
    return [stored_name(name)]


def from_stored(stored: list[Tensor], name: str, config: ModelConfig, part: Part | None) -> Tensor:
    """Return the elements `part` of Hugging Face's tensor of dtgpt's parameter `name` in dtgpt's layout."""
    (whole,) = stored
    return cut(reorder_qkv(whole.T if _is_matrix(name) else whole, name, config), part)


def to_stored(whole: Tensor, name: str, config: ModelConfig) -> list[Tensor]:
    """Return dtgpt's parameter `name` in Hugging Face's layout."""
    if ".attn.qkv." in name:
        whole = rearrange(whole, "(n three d) ... -> (three n d) ...", three=3, n=config.num_heads)
    return [whole.T if _is_matrix(name) else whole]


def reorder_qkv(stored: Tensor, name: str, config: ModelConfig) -> Tensor:
    """Return a tensor with matrices `[out, in]`, as nanoGPT and llm.c have them, in dtgpt's layout."""
    if ".attn.qkv." not in name:
        return stored
    return rearrange(stored, "(three n d) ... -> (n three d) ...", three=3, n=config.num_heads)


def _is_matrix(name: str) -> bool:
    return name.endswith(".weight") and (".attn." in name or ".mlp." in name)


def read_config(settings: dict[str, Any], path: Path) -> GPT2Config:
    """Return the shape that config.json describes, with transformers' defaults. Raise UserError for options that dtgpt
    does not have."""
    width = whole_number(settings, ("n_embd", "hidden_size"), 768, path)
    rules: Rules = {
        "n_inner": (None, lambda v: v in (None, 4 * width), f"the MLP of dtgpt's GPT-2 is 4 n_embd = {4 * width} wide"),
        "tie_word_embeddings": (True, lambda v: v is True, "the output projection of dtgpt's GPT-2 is the token table"),
        "scale_attn_weights": (True, lambda v: v is True, "dtgpt divides scores by sqrt(D)"),
        "scale_attn_by_inverse_layer_idx": (False, lambda v: v is False, "dtgpt divides scores by sqrt(D) alone"),
        "add_cross_attention": (False, lambda v: v is False, "dtgpt's GPT-2 has no encoder to attend to"),
    }
    check_rules(settings, rules, path)
    check_names(settings, ALIASES, path)
    config = GPT2Config(
        num_layers=whole_number(settings, ("n_layer", "num_hidden_layers"), 12, path),
        hidden_size=width,
        num_heads=whole_number(settings, ("n_head", "num_attention_heads"), 12, path),
        seq_length=whole_number(settings, ("n_positions", "max_position_embeddings", "n_ctx"), 1024, path),
        vocab_size=whole_number(settings, ("vocab_size",), GPT2_124M.vocab_size, path),
        layer_norm_eps=epsilon(settings, ("layer_norm_epsilon",), 1e-5, path),
        activation=read_activation(settings, "activation_function", "gelu_new", path, gated=False),
    )
    return checked(config, path)


def write_config(config: GPT2Config) -> dict[str, Any]:
    """Return the fields of config.json."""
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
        "activation_function": write_activation(config.activation, "gelu_new"),
        "n_layer": config.num_layers, "n_embd": config.hidden_size, "n_head": config.num_heads, "n_inner": None,
        "n_positions": config.seq_length, "n_ctx": config.seq_length, "vocab_size": config.vocab_size,
        "layer_norm_epsilon": config.layer_norm_eps, "initializer_range": config.init_std,
        "resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": config.dropout,
        "scale_attn_weights": True, "tie_word_embeddings": True,
    }  # fmt: skip

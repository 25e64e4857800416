"""GPT-2 as transformers has it: names, layout and the fields of config.json.

OpenAI's release, and after it nanoGPT, Hugging Face and llm.c, keep the fused QKV as `[3, N, D]` along its output and
name blocks `h.0`. Hugging Face's matrices lie transposed, `[in, out]`, as OpenAI's.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from einops import rearrange
from torch import Tensor

from dtgpt.interop.foreign import checked
from dtgpt.interop.hf.architecture import Architecture, read_activation, write_activation
from dtgpt.interop.keys import (
    EPSILON,
    Key,
    Keys,
    among,
    check_aliases,
    check_keys,
    just,
    not_here,
    read_key,
    whole_number,
)
from dtgpt.models.config import ModelConfig
from dtgpt.models.gpt2 import GPT2_124M, GPT2Config
from dtgpt.models.shared.foreign import cut
from dtgpt.models.source import Ranges

# transformers' names of one number: its own, and that of other families.
ALIASES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
KEYS: Keys = {
    "tie_word_embeddings": Key(just(True), not_here("the output projection of dtgpt's GPT-2 is the token table"), True),
    "scale_attn_weights": Key(just(True), not_here("dtgpt divides scores by sqrt(D)"), True),
    "scale_attn_by_inverse_layer_idx": Key(just(False), not_here("dtgpt divides scores by sqrt(D) alone"), False),
    "add_cross_attention": Key(just(False), not_here("dtgpt's GPT-2 has no encoder to attend to"), False),
}


class GPT2(Architecture):
    prefix = "transformer."
    buffers = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # the causal mask, which old versions saved too
    names: ClassVar[Mapping[str, str]] = {
        "embedding.wte": "wte",
        "embedding.wpe": "wpe",
        "head.ln_f": "ln_f",
        "head.lm_head": "lm_head",
        "blocks.": "h.",
        "attn.qkv": "attn.c_attn",
        "attn.proj": "attn.c_proj",
        "mlp.fc": "mlp.c_fc",
        "mlp.proj": "mlp.c_proj",
    }
    transposed = True

    def from_stored(self, stored: list[Tensor], name: str, config: ModelConfig, part: Ranges | None) -> Tensor:
        (whole,) = stored
        return cut(reorder_qkv(whole.T if _is_matrix(name) else whole, name, config), part)

    def to_stored(self, whole: Tensor, name: str, config: ModelConfig) -> list[Tensor]:
        if ".attn.qkv." in name:
            whole = rearrange(whole, "(n three d) ... -> (three n d) ...", three=3, n=config.num_heads)
        return [whole.T if _is_matrix(name) else whole]

    def read_config(self, settings: dict[str, Any], path: Path) -> GPT2Config:
        width = whole_number(settings, ("n_embd", "hidden_size"), 768, path)
        check_keys(settings, {"n_inner": width_of_mlp("n_embd", width), **KEYS}, path)
        check_aliases(settings, ALIASES, path)
        config = GPT2Config(
            num_layers=whole_number(settings, ("n_layer", "num_hidden_layers"), 12, path),
            hidden_size=width,
            num_heads=whole_number(settings, ("n_head", "num_attention_heads"), 12, path),
            seq_length=whole_number(settings, ("n_positions", "max_position_embeddings", "n_ctx"), 1024, path),
            vocab_size=whole_number(settings, ("vocab_size",), GPT2_124M.vocab_size, path),
            layer_norm_eps=read_key(settings, ("layer_norm_epsilon",), EPSILON, path, 1e-5),
            activation=read_activation(settings, "activation_function", "gelu_new", path, gated=False),
        )
        return checked(config, path)

    def write_config(self, config: GPT2Config) -> dict[str, Any]:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": write_activation(config.activation, "gelu_new"),
            "n_layer": config.num_layers,
            "n_embd": config.hidden_size,
            "n_head": config.num_heads,
            "n_inner": None,
            "n_positions": config.seq_length,
            "n_ctx": config.seq_length,
            "vocab_size": config.vocab_size,
            "layer_norm_epsilon": config.layer_norm_eps,
            "initializer_range": config.init_std,
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
            "scale_attn_weights": True,
            "tie_word_embeddings": True,
        }


GPT_2 = GPT2()


def width_of_mlp(name: str, width: int, family: str = "GPT-2") -> Key:
    """Return what the key of an MLP's width may say, where dtgpt has 4 times that of the model, which is `name`."""
    return Key(among((None, 4 * width)), not_here(f"the MLP of dtgpt's {family} is 4 {name} = {4 * width} wide"))


def reorder_qkv(stored: Tensor, name: str, config: ModelConfig) -> Tensor:
    """Return a tensor with matrices `[out, in]`, as nanoGPT and llm.c have them, in dtgpt's layout."""
    if ".attn.qkv." not in name:
        return stored
    return rearrange(stored, "(three n d) ... -> (n three d) ...", three=3, n=config.num_heads)


def _is_matrix(name: str) -> bool:
    return name.endswith(".weight") and (".attn." in name or ".mlp." in name)

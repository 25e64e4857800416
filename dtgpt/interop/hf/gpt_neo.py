"""GPT-Neo as transformers has it: names, layout and the fields of config.json. Its matrices lie `[out, in]`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from dtgpt.interop.foreign import checked, shortest_pattern
from dtgpt.interop.hf.architecture import Architecture, read_activation, write_activation
from dtgpt.interop.hf.gpt2 import width_of_mlp
from dtgpt.interop.keys import EPSILON, POSITIVE, Key, check_aliases, check_keys, just, not_here, read_key, whole_number
from dtgpt.models.families.gpt_neo import GPTNeoConfig
from dtgpt.models.rotary import MOST_KINDS
from dtgpt.util.errors import UserError, shown

KINDS = ("global", "local")
ALIASES = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}  # transformers' names of one number
TIED = Key(just(True), not_here("the output projection of dtgpt's GPT-Neo is the token table"), True)


class GPTNeo(Architecture):
    prefix = "transformer."
    buffers = re.compile(r"h\.\d+\.attn\.attention\.(masked_)?bias")  # the causal mask, which old versions saved too
    names: ClassVar[Mapping[str, str]] = {
        "embedding.wte": "wte",
        "embedding.wpe": "wpe",
        "head.ln_f": "ln_f",
        "head.lm_head": "lm_head",
        "blocks.": "h.",
        "attn.proj": "attn.out_proj",
        "attn.": "attn.attention.",
        "mlp.fc": "mlp.c_fc",
        "mlp.proj": "mlp.c_proj",
    }
    packed: ClassVar[Mapping[str, Sequence[str]]] = {"attn.qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj")}

    def rows_of_group(self, name: str, config: GPTNeoConfig) -> list[int]:
        return [config.head_dim] * len(self.stored_names(name, config))

    def read_config(self, settings: dict[str, Any], path: Path) -> GPTNeoConfig:
        width = whole_number(settings, ("hidden_size",), 2048, path)
        keys = {
            "intermediate_size": width_of_mlp("hidden_size", width, "GPT-Neo"),
            "tie_word_embeddings": TIED,
        }
        check_keys(settings, keys, path)
        check_aliases(settings, ALIASES, path)
        layers = whole_number(settings, ("num_layers", "num_hidden_layers"), 24, path)
        config = GPTNeoConfig(
            num_layers=layers,
            hidden_size=width,
            num_heads=whole_number(settings, ("num_heads", "num_attention_heads"), 16, path),
            seq_length=whole_number(settings, ("max_position_embeddings",), 2048, path),
            vocab_size=whole_number(settings, ("vocab_size",), 50257, path),
            layer_norm_eps=read_key(settings, ("layer_norm_epsilon",), EPSILON, path, 1e-5),
            activation=read_activation(settings, "activation_function", "gelu_new", path, gated=False),
            window=read_key(settings, ("window_size",), POSITIVE, path, 256),
            window_pattern=_read_pattern(settings, layers, path),
        )
        return checked(config, path)

    def write_config(self, config: GPTNeoConfig) -> dict[str, Any]:
        layers = [KINDS[config.is_local(layer)] for layer in range(config.num_layers)]
        return {
            "architectures": ["GPTNeoForCausalLM"],
            "model_type": "gpt_neo",
            "activation_function": write_activation(config.activation, "gelu_new"),
            "num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "num_heads": config.num_heads,
            "intermediate_size": None,
            "max_position_embeddings": config.seq_length,
            "vocab_size": config.vocab_size,
            "layer_norm_epsilon": config.layer_norm_eps,
            "initializer_range": config.init_std,
            "attention_types": [[[kind], 1] for kind in layers],
            "attention_layers": layers,
            "window_size": config.window or config.seq_length,
            "resid_dropout": config.dropout,
            "embed_dropout": config.dropout,
            "attention_dropout": config.dropout,
            "tie_word_embeddings": True,
        }


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

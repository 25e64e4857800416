"""GPT-OSS as transformers has it, with one expert: names, layout and the fields of config.json.

The expert's matrices lie `[1, in, out]` there, gate and up interleaved as in dtgpt. The softmax of a router over one
expert is 1 whatever its weights are: these are not read, and written as zeros.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from dtgpt.interop.foreign import Rules, check_rules, checked, epsilon, whole_number
from dtgpt.interop.hf import llama
from dtgpt.interop.hf.llama import PREFIX
from dtgpt.interop.hf.rope import LENGTH, read_rope, write_rope
from dtgpt.models.config import ModelConfig
from dtgpt.models.families.gpt_oss import GptOssConfig
from dtgpt.models.source import Part, cut
from dtgpt.ops.activations import LIMIT, SLOPE
from dtgpt.util.errors import UserError

__all__ = ["BUFFERS", "PREFIX", "from_stored", "read_config", "stored_names", "to_stored", "write_config"]
BUFFERS = re.compile(r"rotary_emb\.\w+")
NAMES = {"attn.core.sinks": "attn.sinks", **llama.NAMES}
EXPERT = {
    "gate_up.weight": ("experts.gate_up_proj",),
    "gate_up.bias": ("experts.gate_up_proj_bias", "router.weight", "router.bias"),  # the router goes with the bias
    "down.weight": ("experts.down_proj",),
    "down.bias": ("experts.down_proj_bias",),
}
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, LENGTH: 4096,
}  # fmt: skip


def stored_names(name: str) -> list[str]:
    """Return transformers' names of dtgpt's parameter `name`, without PREFIX."""
    before, mlp, own = name.rpartition(".mlp.")
    if not mlp:
        return llama.stored_names(name, NAMES)
    return [before.replace("blocks.", "layers.") + mlp + each for each in EXPERT[own]]


def from_stored(stored: list[Tensor], name: str, config: ModelConfig, part: Part | None) -> Tensor:
    """Return the elements `part` of dtgpt's parameter `name`."""
    if ".mlp." not in name:
        return llama.from_stored(stored, name, config, part)
    return cut(stored[0][0].t(), part)


def to_stored(whole: Tensor, name: str, config: ModelConfig) -> list[Tensor]:
    """Return dtgpt's parameter `name` as transformers has it."""
    if ".mlp." not in name:
        return llama.to_stored(whole, name, config)
    router = [whole.new_zeros(1, config.hidden_size), whole.new_zeros(1)] if name.endswith("gate_up.bias") else []
    return [whole.t()[None], *router]


def is_one(value: Any) -> bool:
    """Return whether a value of config.json is the number 1."""
    return type(value) is int and value == 1


def read_config(settings: dict[str, Any], path: Path) -> GptOssConfig:
    """Return the shape that config.json describes, with transformers' defaults. Raise UserError for options that dtgpt
    does not have."""
    one = "dtgpt's GPT-OSS is dense: it has one expert"
    rules: Rules = {
        "num_local_experts": (128, is_one, one),
        "num_experts": (1, is_one, one),  # another name of it in transformers
        "num_experts_per_tok": (4, is_one, one),
        "attention_bias": (True, lambda v: v is True, "the attention of dtgpt's GPT-OSS has biases"),
        "hidden_act": ("silu", lambda v: v == "silu", "dtgpt's GPT-OSS has a clamped SwiGLU"),
        "swiglu_alpha": (SLOPE, lambda v: v == SLOPE, f"dtgpt's clamped SwiGLU has {SLOPE}"),
        "swiglu_limit": (LIMIT, lambda v: v == LIMIT, f"dtgpt's clamped SwiGLU has {LIMIT}"),
        "tie_word_embeddings": (False, lambda v: isinstance(v, bool), "the key is true or false"),
    }
    check_rules(settings, rules, path)
    if settings.get("rope_parameters") is None and not settings.get("rope_scaling"):  # an empty one counts as none
        settings = {**settings, "rope_parameters": YARN}
    width = whole_number(settings, ("hidden_size",), 2880, path)
    heads = whole_number(settings, ("num_attention_heads",), 64, path)
    layers = whole_number(settings, ("num_hidden_layers",), 36, path)
    positions = whole_number(settings, ("max_position_embeddings",), 131072, path)
    groups, size = heads if "num_key_value_heads" in settings else 8, width // max(heads, 1)  # null: as many, or this
    config = GptOssConfig(
        num_layers=layers,
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=whole_number(settings, ("num_key_value_heads",), groups, path),
        head_dim=whole_number(settings, ("head_dim",), size if "head_dim" in settings else 64, path),
        ffn_hidden_size=whole_number(settings, ("intermediate_size",), 2880, path),
        seq_length=positions,
        vocab_size=whole_number(settings, ("vocab_size",), 201088, path),
        tied=settings.get("tie_word_embeddings", False),
        norm_eps=epsilon(settings, ("rms_norm_eps",), 1e-5, path),
        **llama.read_pattern(settings, layers, 128, "LG", path),
        **{"rope_factor": 1.0} | read_rope(settings, positions, path, theta=150000.0),
    )
    return checked(config, path)


def write_config(config: GptOssConfig) -> dict[str, Any]:
    """Return the fields of config.json. Raise UserError for an activation that transformers' GPT-OSS does not have."""
    if config.activation != "clamped_swiglu":
        raise UserError(
            f"transformers' GPT-OSS has the activation clamped_swiglu, and this model model.activation="
            f"{config.activation}; keep it as a checkpoint of dtgpt"
        )
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", **llama.shape_of(config),
        "num_local_experts": 1, "num_experts_per_tok": 1, "hidden_act": "silu", "attention_bias": True,
        "swiglu_alpha": SLOPE, "swiglu_limit": LIMIT, **llama.write_pattern(config), **write_rope(config),
    }  # fmt: skip

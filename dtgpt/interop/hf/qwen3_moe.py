"""Qwen3-MoE as transformers has it: names and the fields of config.json, which say what layers have experts, too."""

from pathlib import Path
from typing import Any

from dtgpt.interop.foreign import checked, shortest_pattern
from dtgpt.interop.hf.architecture import Architecture, read_activation, write_activation
from dtgpt.interop.hf.experts import LikeMixture, only_window, read_experts, write_experts
from dtgpt.interop.hf.llama import TIED, Family, read_shape, read_window, write_shape
from dtgpt.interop.hf.rope import read_rope, write_rope
from dtgpt.interop.keys import FLAG, POSITIVE, Key, Keys, check_keys, read_key, whole_number
from dtgpt.models.families.qwen3_moe import WITH, WITHOUT, Qwen3MoeConfig
from dtgpt.models.rotary import MOST_KINDS
from dtgpt.util.errors import UserError
from dtgpt.util.rules import Is, Rule, Rules, check_rules

FAMILY = Family(4, None, 6144, 32768, 151936, window=4096, windows="all", hidden=2048, layers=24)


def _are_layers(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(type(layer) is int for layer in value))


ARE_LAYERS = Key(_are_layers, "; it must be a list of the numbers of layers without experts")
SPARSE: Keys = {  # of Qwen2-MoE, too
    "norm_topk_prob": FLAG._replace(default=False),
    "use_sliding_window": FLAG._replace(default=False),
    "mlp_only_layers": ARE_LAYERS,
    "tie_word_embeddings": TIED,
}
KEYS: Keys = {"attention_bias": FLAG._replace(default=False), **SPARSE}
WRITTEN_RULES: Rules = (
    Rule(
        "transformers' Qwen3-MoE has biases of all matrices of attention or none, and this model "
        "model.attention_bias={attention_bias}; keep it as a checkpoint of dtgpt",
        Is("attention_bias", "==", "qkv"),
    ),
)


class Qwen3Moe(LikeMixture):
    buffers = Architecture.buffers

    def read_config(self, settings: dict[str, Any], path: Path) -> Qwen3MoeConfig:
        check_keys(settings, KEYS, path)
        shape = read_shape(settings, FAMILY, path)
        windows = settings if settings.get("use_sliding_window", False) else {**settings, "sliding_window": None}
        config = Qwen3MoeConfig(
            activation=read_activation(settings, "hidden_act", "silu", path),
            attention_bias="all" if settings.get("attention_bias", False) else "none",
            normalise_weights=settings.get("norm_topk_prob", False),
            expert_size=whole_number(settings, ("moe_intermediate_size",), 768, path),
            expert_pattern=read_sparse_layers(settings, shape["num_layers"], path),
            **read_experts(settings, 128, 8, path),
            **shape,
            **read_window(windows, FAMILY, shape["num_layers"], path),
            **read_rope(settings, shape["seq_length"], path),
        )
        return checked(config, path)

    def write_config(self, config: Qwen3MoeConfig) -> dict[str, Any]:
        check_rules(WRITTEN_RULES, config)
        window = only_window(config, "Qwen3-MoE")
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **write_shape(config),
            "moe_intermediate_size": config.expert_size,
            **write_experts(config, "num_experts"),
            "norm_topk_prob": config.normalise_weights,
            **write_sparse_layers(config),
            "hidden_act": write_activation(config.activation),
            "attention_bias": config.attention_bias == "all",
            "use_sliding_window": window is not None,
            "sliding_window": window,
            **write_rope(config),
        }


def read_sparse_layers(settings: dict[str, Any], layers: int, path: Path) -> str:
    """Return the `expert_pattern` of config.json: every so many layers, but those of `mlp_only_layers`, have
    experts."""
    step = read_key(settings, ("decoder_sparse_step",), POSITIVE, path, 1)
    dense = set(settings.get("mlp_only_layers") or ())
    if step == 1 and not dense:
        return WITH
    if layers > MOST_KINDS:
        raise UserError(
            f"{path} has num_hidden_layers={layers}, some of them without experts, and dtgpt at most {MOST_KINDS} of "
            "two kinds; give another model"
        )
    kinds = [(layer + 1) % step == 0 and layer not in dense for layer in range(layers)]
    return shortest_pattern(kinds, WITH + WITHOUT)


def write_sparse_layers(config: Qwen3MoeConfig) -> dict[str, Any]:
    """Return the keys that `read_sparse_layers` reads."""
    dense = [layer for layer in range(config.num_layers) if not config.has_experts(layer)]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}

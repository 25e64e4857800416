"""Qwen2-MoE as transformers has it: names and the fields of config.json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from dtgpt.interop.foreign import checked
from dtgpt.interop.hf.architecture import Architecture, read_activation, write_activation
from dtgpt.interop.hf.experts import LikeMixture, read_experts, write_experts
from dtgpt.interop.hf.llama import Family, read_shape, read_window, write_kinds, write_shape
from dtgpt.interop.hf.qwen3_moe import SPARSE, read_sparse_layers, write_sparse_layers
from dtgpt.interop.hf.rope import FULL, SLIDING, read_rope, write_rope
from dtgpt.interop.keys import FLAG, Keys, check_keys, whole_number
from dtgpt.models.families.qwen2_moe import Qwen2MoeConfig
from dtgpt.models.rotary import MOST_KINDS
from dtgpt.util.rules import Is, Rule, Rules, check_rules

FAMILY = Family(16, None, 5632, 32768, 151936, window=4096, windows="typed", hidden=2048, layers=24, heads=16)
KEYS: Keys = {"qkv_bias": FLAG._replace(default=True), **SPARSE}
WRITTEN_RULES: Rules = (
    Rule(
        "transformers' Qwen2-MoE has no bias of attention's output, and this model model.attention_bias="
        "{attention_bias}; keep it as a checkpoint of dtgpt",
        Is("attention_bias", "==", "all"),
    ),
)


class Qwen2Moe(LikeMixture):
    buffers = Architecture.buffers
    names: ClassVar[Mapping[str, str]] = {
        "mlp.shared_gate": "mlp.shared_expert_gate",
        "mlp.shared.": "mlp.shared_expert.",
        "shared_expert.down": "shared_expert.down_proj",
        **LikeMixture.names,
    }
    packed: ClassVar[Mapping[str, Sequence[str]]] = {
        **LikeMixture.packed,
        "mlp.shared.gate_up": ("mlp.shared.gate_proj", "mlp.shared.up_proj"),
    }

    def read_config(self, settings: dict[str, Any], path: Path) -> Qwen2MoeConfig:
        check_keys(settings, KEYS, path)
        shape = read_shape(settings, FAMILY, path)
        config = Qwen2MoeConfig(
            activation=read_activation(settings, "hidden_act", "silu", path),
            attention_bias="qkv" if settings.get("qkv_bias", True) else "none",
            normalise_weights=settings.get("norm_topk_prob", False),
            expert_size=whole_number(settings, ("moe_intermediate_size",), 1408, path),
            shared_size=whole_number(settings, ("shared_expert_intermediate_size",), 5632, path),
            expert_pattern=read_sparse_layers(settings, shape["num_layers"], path),
            **read_experts(settings, 60, 4, path),
            **shape,
            **read_window(_with_kinds(settings, shape["num_layers"], path), FAMILY, shape["num_layers"], path),
            **read_rope(settings, shape["seq_length"], path),
        )
        return checked(config, path)

    def write_config(self, config: Qwen2MoeConfig) -> dict[str, Any]:
        check_rules(WRITTEN_RULES, config)
        kinds = write_kinds(config)
        return {
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            **write_shape(config),
            "moe_intermediate_size": config.expert_size,
            "shared_expert_intermediate_size": config.shared_size,
            **write_experts(config, "num_experts"),
            "norm_topk_prob": config.normalise_weights,
            **write_sparse_layers(config),
            "hidden_act": write_activation(config.activation),
            "qkv_bias": config.attention_bias == "qkv",
            "use_sliding_window": SLIDING in kinds,
            "sliding_window": config.window if SLIDING in kinds else None,
            "layer_types": kinds,
            **write_rope(config),
        }


def _with_kinds(settings: dict[str, Any], layers: int, path: Path) -> dict[str, Any]:
    """Return settings whose window is null where it is switched off, and whose `layer_types` are those that
    transformers makes of the other keys where they are missing: each second layer, up to `max_window_layers`."""
    if not settings.get("use_sliding_window", False):
        return {**settings, "sliding_window": None}
    if settings.get("layer_types") is not None:
        return settings
    last = whole_number(settings, ("max_window_layers",), 28, path)
    kinds = [SLIDING if layer % 2 == 0 and layer < last else FULL for layer in range(min(layers, MOST_KINDS + 1))]
    return {**settings, "layer_types": kinds}

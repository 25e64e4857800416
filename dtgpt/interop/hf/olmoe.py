"""OLMoE as transformers has it: names and the fields of config.json."""

from pathlib import Path
from typing import Any

from dtgpt.interop.foreign import checked
from dtgpt.interop.hf.architecture import Architecture, read_activation, write_activation
from dtgpt.interop.hf.experts import NO_WINDOWS, LikeMixture, read_experts, write_experts
from dtgpt.interop.hf.llama import TIED, Family, read_shape, write_shape
from dtgpt.interop.hf.rope import read_rope, write_rope
from dtgpt.interop.keys import FLAG, Key, Keys, check_keys, is_off, not_here
from dtgpt.models.families.olmoe import OlmoeConfig
from dtgpt.util.errors import UserError
from dtgpt.util.rules import check_rules

FAMILY = Family(None, None, 2048, 4096, 50304, eps=1e-5, hidden=2048, layers=16, heads=16)


def _is_limit(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6)


KEYS: Keys = {
    "attention_bias": Key(is_off, not_here("the attention of dtgpt's OLMoE has no biases"), False),
    "norm_topk_prob": FLAG._replace(default=False),
    "clip_qkv": Key(_is_limit, not_here("the limit of queries, keys and values is null or a positive number")),
    "tie_word_embeddings": TIED,
}


class Olmoe(LikeMixture):
    buffers = Architecture.buffers

    def read_config(self, settings: dict[str, Any], path: Path) -> OlmoeConfig:
        check_keys(settings, KEYS, path)
        shape = read_shape(settings, FAMILY, path)
        config = OlmoeConfig(
            activation=read_activation(settings, "hidden_act", "silu", path),
            normalise_weights=settings.get("norm_topk_prob", False),
            clip_qkv=float(settings.get("clip_qkv") or 0),
            **read_experts(settings, 64, 8, path),
            **shape,
            **read_rope(settings, shape["seq_length"], path),
        )
        return checked(config, path)

    def write_config(self, config: OlmoeConfig) -> dict[str, Any]:
        if config.corrects_choice:
            raise UserError(
                "model.corrects_choice=True, but OLMoE's files have no place for the correction of a router's choice, "
                "without which other experts would be chosen; keep the model as a checkpoint of dtgpt"
            )
        check_rules(NO_WINDOWS, config)
        return {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            **write_shape(config),
            **write_experts(config, "num_experts"),
            "norm_topk_prob": config.normalise_weights,
            "clip_qkv": config.clip_qkv or None,
            "hidden_act": write_activation(config.activation),
            "attention_bias": False,
            **write_rope(config),
        }

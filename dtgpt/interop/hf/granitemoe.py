"""Granite-MoE as transformers has it: names, layout and the fields of config.json.

Experts are stacks there, too, with the rows of the gate above those of the up.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from dtgpt.interop.foreign import checked
from dtgpt.interop.hf.architecture import Architecture, read_activation, write_activation
from dtgpt.interop.hf.experts import NO_WINDOWS, alternating, gates_first, read_experts, write_experts
from dtgpt.interop.hf.llama import TIED, Family, LikeLlama, read_shape, write_shape
from dtgpt.interop.hf.rope import read_rope, write_rope
from dtgpt.interop.keys import FLAG, NUMBER, Keys, check_keys, read_key
from dtgpt.models.config import ModelConfig
from dtgpt.models.families.granitemoe import GraniteMoeConfig
from dtgpt.models.shared.foreign import cut
from dtgpt.models.source import Ranges
from dtgpt.util.rules import check_rules

FAMILY = Family(None, None, 11008, 2048, 32000)
KEYS: Keys = {"attention_bias": FLAG._replace(default=False), "tie_word_embeddings": TIED}
FACTORS = {
    "embedding_multiplier": "embedding_factor",
    "residual_multiplier": "residual_factor",
    "attention_multiplier": "attention_scale",
    "logits_scaling": "logit_divisor",
}
GATES = ".mlp.experts.gate_up."


class GraniteMoe(LikeLlama):
    experts = "block_sparse_moe.experts"
    buffers = Architecture.buffers
    names: ClassVar[Mapping[str, str]] = {
        **LikeLlama.names,
        "mlp.router": "block_sparse_moe.router.layer",
        "mlp.experts.gate_up": "block_sparse_moe.input_linear",
        "mlp.experts.down": "block_sparse_moe.output_linear",
    }

    def from_stored(self, stored: list[Tensor], name: str, config: ModelConfig, part: Ranges | None) -> Tensor:
        if GATES not in name:
            return super().from_stored(stored, name, config, part)
        experts, inside = (slice(None), ()) if part is None else (slice(part[0].start, part[0].stop), part[1:])
        whole = alternating(stored[0][experts])
        return cut(whole, (range(len(whole)), *inside)) if inside else whole

    def to_stored(self, whole: Tensor, name: str, config: ModelConfig) -> list[Tensor]:
        if GATES not in name:
            return super().to_stored(whole, name, config)
        return [gates_first(whole)]

    def read_config(self, settings: dict[str, Any], path: Path) -> GraniteMoeConfig:
        check_keys(settings, KEYS, path)
        shape = read_shape(settings, FAMILY, path)
        factors: dict[str, Any] = {
            ours: float(read_key(settings, (name,), NUMBER, path, 1.0)) for name, ours in FACTORS.items()
        }
        config = GraniteMoeConfig(
            activation=read_activation(settings, "hidden_act", "silu", path),
            attention_bias=settings.get("attention_bias", False),
            **factors,
            **read_experts(settings, 8, 2, path),
            **shape,
            **read_rope(settings, shape["seq_length"], path),
        )
        return checked(config, path)

    def write_config(self, config: GraniteMoeConfig) -> dict[str, Any]:
        check_rules(NO_WINDOWS, config)
        return {
            "architectures": ["GraniteMoeForCausalLM"],
            "model_type": "granitemoe",
            **write_shape(config),
            **write_experts(config, "num_local_experts"),
            **{name: getattr(config, ours) for name, ours in FACTORS.items()},
            "hidden_act": write_activation(config.activation),
            "attention_bias": config.attention_bias,
            **write_rope(config),
        }

"""Mixtral as transformers has it: names and the fields of config.json. Gate, up and down are w1, w3 and w2 there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from dtgpt.interop.foreign import checked
from dtgpt.interop.hf.architecture import Architecture, read_activation, write_activation
from dtgpt.interop.hf.experts import LikeMixture, only_window, read_experts, write_experts
from dtgpt.interop.hf.llama import TIED, Family, read_shape, read_window, write_shape
from dtgpt.interop.hf.rope import read_rope, write_rope
from dtgpt.interop.keys import Key, Keys, check_keys, is_off
from dtgpt.models.families.mixtral import MixtralConfig

FAMILY = Family(8, None, 14336, 131072, 32000, eps=1e-5, windows="all")
KEYS: Keys = {
    "router_jitter_noise": Key(
        is_off,
        "; in training that multiplies what routers see by random numbers, which dtgpt does not: write 0, which "
        "changes nothing after training",
    ),
    "tie_word_embeddings": TIED,
}


class Mixtral(LikeMixture):
    buffers = Architecture.buffers
    names: ClassVar[Mapping[str, str]] = {**LikeMixture.names, "mlp.router": "block_sparse_moe.gate"}
    stacks: ClassVar[Mapping[str, Sequence[str]]] = {
        "mlp.experts.gate_up": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        "mlp.experts.down": ("block_sparse_moe.experts.{}.w2",),
    }

    def read_config(self, settings: dict[str, Any], path: Path) -> MixtralConfig:
        check_keys(settings, KEYS, path)
        shape = read_shape(settings, FAMILY, path)
        config = MixtralConfig(
            activation=read_activation(settings, "hidden_act", "silu", path),
            **read_experts(settings, 8, 2, path),
            **shape,
            **read_window(settings, FAMILY, shape["num_layers"], path),
            **read_rope(settings, shape["seq_length"], path, theta=1000000.0),
        )
        return checked(config, path)

    def write_config(self, config: MixtralConfig) -> dict[str, Any]:
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            **write_shape(config),
            **write_experts(config, "num_local_experts"),
            "hidden_act": write_activation(config.activation),
            "sliding_window": only_window(config, "Mixtral"),
            **write_rope(config),
        }

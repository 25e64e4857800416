"""OLMo 3 as transformers has it: names and the fields of config.json; the layout is that of LLaMA."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from dtgpt.interop.foreign import checked
from dtgpt.interop.hf.architecture import Architecture, read_activation, write_activation
from dtgpt.interop.hf.llama import TIED, Family, LikeLlama, read_pattern, read_shape, write_pattern, write_shape
from dtgpt.interop.hf.rope import FULL, SLIDING, read_rope_of_kinds, write_rope_of_kinds
from dtgpt.interop.keys import Key, Keys, check_keys, is_off, not_here
from dtgpt.models.families.olmo3 import Olmo3Config
from dtgpt.util.errors import UserError

FAMILY = Family(None, None, 11008, 2048, 50304, eps=1e-5)
THETA = {FULL: 500000.0, SLIDING: 500000.0}
KEYS: Keys = {
    "attention_bias": Key(is_off, not_here("the attention of dtgpt's OLMo 3 has no biases"), False),
    "tie_word_embeddings": TIED,
}


class Olmo3(LikeLlama):
    buffers = Architecture.buffers
    names: ClassVar[Mapping[str, str]] = {
        **LikeLlama.names,
        "norm_1": "post_attention_layernorm",
        "norm_2": "post_feedforward_layernorm",
    }

    def read_config(self, settings: dict[str, Any], path: Path) -> Olmo3Config:
        check_keys(settings, KEYS, path)
        shape = read_shape(settings, FAMILY, path)
        full, sliding = read_rope_of_kinds(settings, shape["seq_length"], path, THETA, "rope_theta")
        own = ((settings.get("rope_parameters") or {}).get(SLIDING) or {}).get("rope_theta")
        theta = sliding["rope_theta"] if own else THETA[SLIDING]  # as transformers 5 takes it, whatever rope_theta says
        if full["rope_theta"] != theta:
            raise UserError(
                f"{path} has rope_theta={full['rope_theta']} of {FULL} and {theta} of {SLIDING}; dtgpt has one for "
                "both: give another model"
            )
        config = Olmo3Config(
            activation=read_activation(settings, "hidden_act", "silu", path),
            **shape,
            **read_pattern(settings, shape["num_layers"], 4096, "LLLG", path),
            **full,
        )
        return checked(config, path)

    def write_config(self, config: Olmo3Config) -> dict[str, Any]:
        return {
            "architectures": ["Olmo3ForCausalLM"],
            "model_type": "olmo3",
            **write_shape(config),
            "hidden_act": write_activation(config.activation),
            "attention_bias": False,
            **write_pattern(config),
            **write_rope_of_kinds(config, config.rope_theta, "rope_theta"),
        }

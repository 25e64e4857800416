"""GPT-OSS as transformers has it, with one expert: names, layout and the fields of config.json.

The expert's matrices lie `[1, in, out]` there, gate and up interleaved as in dtgpt. The softmax of a router over one
expert is 1 whatever its weights are: these are not read, and written as zeros.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from dtgpt.interop.foreign import checked
from dtgpt.interop.hf.architecture import Architecture
from dtgpt.interop.hf.llama import TIED, Family, LikeLlama, read_pattern, read_shape, write_pattern, write_shape
from dtgpt.interop.hf.rope import LENGTH, read_rope, write_rope
from dtgpt.interop.keys import Key, Keys, among, check_keys, just, not_here
from dtgpt.models.config import ModelConfig
from dtgpt.models.families.gpt_oss import GptOssConfig
from dtgpt.models.shared.foreign import cut
from dtgpt.models.source import Part
from dtgpt.ops.more_activations import LIMIT, SLOPE
from dtgpt.util.rules import Is, Rule, Rules, check_rules

FAMILY = Family(8, 64, 2880, 131072, 201088, eps=1e-5, hidden=2880, layers=36, heads=64)
EXPERT = {
    "gate_up.weight": ("experts.gate_up_proj",),
    "gate_up.bias": ("experts.gate_up_proj_bias", "router.weight", "router.bias"),  # the router goes with the bias
    "down.weight": ("experts.down_proj",),
    "down.bias": ("experts.down_proj_bias",),
}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, LENGTH: 4096}


ONE = Key(just(1), not_here("dtgpt's GPT-OSS is dense: it has one expert"))
KEYS: Keys = {
    "num_local_experts": ONE._replace(default=128),
    "num_experts": ONE._replace(default=1),  # another name of it in transformers
    "num_experts_per_tok": ONE._replace(default=4),
    "attention_bias": Key(just(True), not_here("the attention of dtgpt's GPT-OSS has biases"), True),
    "hidden_act": Key(among(["silu"]), not_here("dtgpt's GPT-OSS has a clamped SwiGLU"), "silu"),
    "swiglu_alpha": Key(among([SLOPE]), not_here(f"dtgpt's clamped SwiGLU has {SLOPE}"), SLOPE),
    "swiglu_limit": Key(among([LIMIT]), not_here(f"dtgpt's clamped SwiGLU has {LIMIT}"), LIMIT),
    "tie_word_embeddings": TIED,
}


WRITTEN_RULES: Rules = (
    Rule(
        "transformers' GPT-OSS has the activation clamped_swiglu, and this model model.activation={activation}; keep "
        "it as a checkpoint of dtgpt",
        Is("activation", "!=", "clamped_swiglu"),
    ),
)


class GptOss(LikeLlama):
    buffers = Architecture.buffers
    names: ClassVar[Mapping[str, str]] = {"attn.core.sinks": "attn.sinks", **LikeLlama.names}

    def stored_names(self, name: str, config: Any) -> list[str]:
        before, mlp, own = name.rpartition(".mlp.")
        if not mlp:
            return super().stored_names(name, config)
        return [before.replace("blocks.", "layers.") + mlp + each for each in EXPERT[own]]

    def from_stored(self, stored: list[Tensor], name: str, config: ModelConfig, part: Part | None) -> Tensor:
        if ".mlp." not in name:
            return super().from_stored(stored, name, config, part)
        return cut(stored[0][0].t(), part)

    def to_stored(self, whole: Tensor, name: str, config: ModelConfig) -> list[Tensor]:
        if ".mlp." not in name:
            return super().to_stored(whole, name, config)
        router = [whole.new_zeros(1, config.hidden_size), whole.new_zeros(1)] if name.endswith("gate_up.bias") else []
        return [whole.t()[None], *router]

    def read_config(self, settings: dict[str, Any], path: Path) -> GptOssConfig:
        check_keys(settings, KEYS, path)
        if settings.get("rope_parameters") is None and not settings.get("rope_scaling"):  # an empty one counts as none
            settings = {**settings, "rope_parameters": YARN}
        shape = read_shape(settings, FAMILY, path)
        rope = {"rope_factor": 1.0} | read_rope(settings, shape["seq_length"], path, theta=150000.0)
        pattern = read_pattern(settings, shape["num_layers"], 128, "LG", path)
        return checked(GptOssConfig(**shape, **pattern, **rope), path)

    def write_config(self, config: GptOssConfig) -> dict[str, Any]:
        check_rules(WRITTEN_RULES, config)
        return {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            **write_shape(config),
            "num_local_experts": 1,
            "num_experts_per_tok": 1,
            "hidden_act": "silu",
            "attention_bias": True,
            "swiglu_alpha": SLOPE,
            "swiglu_limit": LIMIT,
            **write_pattern(config),
            **write_rope(config),
        }

"""GPT-OSS as transformers has it: names, layout and the fields of config.json.

Experts' matrices lie `[E, in, out]` there, gate and up interleaved as in dtgpt, or as MXFP4 `[E, out, in]`, which is
read and not written. The softmax of a router over one expert is 1 whatever its weights are: these are not read, and
written as zeros.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from dtgpt.interop.foreign import checked
from dtgpt.interop.hf.architecture import Architecture
from dtgpt.interop.hf.experts import read_experts, write_experts
from dtgpt.interop.hf.llama import TIED, Family, LikeLlama, read_pattern, read_shape, write_pattern, write_shape
from dtgpt.interop.hf.mxfp4 import GROUP, from_mxfp4
from dtgpt.interop.hf.rope import LENGTH, read_rope, write_rope
from dtgpt.interop.keys import Key, Keys, among, check_keys, just, not_here
from dtgpt.models.config import ModelConfig
from dtgpt.models.families.gpt_oss import GptOssConfig
from dtgpt.models.shared.foreign import cut
from dtgpt.models.source import Ranges
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
STACKS = (".experts.gate_up.weight", ".experts.down.weight")
KEYS: Keys = {
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
UNEVEN = (
    f"{{path}} has experts in MXFP4 and {{field}}={{value}}, which is no multiple of the {GROUP} values of a scale; "
    "copy config.json again"
)
PACKED_RULES: Rules = tuple(
    Rule(UNEVEN, Is(name, "is no multiple of", GROUP)) for name in ("hidden_size", "ffn_hidden_size")
)


class GptOss(LikeLlama):
    experts, interleaved = "mlp.experts", True
    buffers = Architecture.buffers
    names: ClassVar[Mapping[str, str]] = {
        "attn.core.sinks": "attn.sinks",
        **{f"mlp.experts.{name}.weight": f"mlp.experts.{name}_proj" for name in ("gate_up", "down")},
        **{f"mlp.experts.{name}.bias": f"mlp.experts.{name}_proj_bias" for name in ("gate_up", "down")},
        **LikeLlama.names,
    }

    def of(self, settings: Mapping[str, Any]) -> Architecture:
        quantised, experts = settings.get("quantization_config"), settings.get("num_local_experts", 128)
        is_packed = isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4" and experts != 1
        return PACKED if is_packed else self

    def stored_names(self, name: str, config: Any) -> list[str]:
        before, mlp, own = name.rpartition(".mlp.")
        if own not in EXPERT:
            return super().stored_names(name, config)
        return [before.replace("blocks.", "layers.") + mlp + each for each in EXPERT[own]]

    def from_stored(self, stored: list[Tensor], name: str, config: ModelConfig, part: Ranges | None) -> Tensor:
        if name.endswith(STACKS):
            return cut(stored[0].transpose(1, 2), part)
        if name.rpartition(".mlp.")[2] in EXPERT:
            return cut(stored[0][0].t(), part)
        return super().from_stored(stored, name, config, part)

    def to_stored(self, whole: Tensor, name: str, config: ModelConfig) -> list[Tensor]:
        if name.endswith(STACKS):
            return [whole.transpose(1, 2)]
        if name.rpartition(".mlp.")[2] not in EXPERT:
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
        experts = read_experts(settings, 128, 4, path)
        return checked(GptOssConfig(**experts, **shape, **pattern, **rope), path)

    def write_config(self, config: GptOssConfig) -> dict[str, Any]:
        check_rules(WRITTEN_RULES, config)
        return {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            **write_shape(config),
            **write_experts(config, "num_local_experts"),
            "hidden_act": "silu",
            "attention_bias": True,
            "swiglu_alpha": SLOPE,
            "swiglu_limit": LIMIT,
            **write_pattern(config),
            **write_rope(config),
        }


class PackedGptOss(GptOss):
    """A GPT-OSS whose experts have 4 bits a value."""

    of_bytes = re.compile(r"layers\.\d+\.mlp\.experts\.(gate_up|down)_proj_(blocks|scales)")
    known = ("quantization_config",)

    def stored_names(self, name: str, config: Any) -> list[str]:
        names = super().stored_names(name, config)
        return [f"{names[0]}_blocks", f"{names[0]}_scales"] if name.endswith(STACKS) else names

    def from_stored(self, stored: list[Tensor], name: str, config: ModelConfig, part: Ranges | None) -> Tensor:
        if not name.endswith(STACKS):
            return super().from_stored(stored, name, config, part)
        if part is None:
            return from_mxfp4(*stored)
        *rows, columns = part
        blocks, scales = (cut(tensor, rows) for tensor in stored)
        return from_mxfp4(blocks, scales)[..., columns.start : columns.stop]

    def to_stored(self, whole: Tensor, name: str, config: ModelConfig) -> list[Tensor]:
        """Return tensors of the shapes that are stored; dtgpt writes none."""
        if not name.endswith(STACKS):
            return super().to_stored(whole, name, config)
        groups = whole.unflatten(-1, (-1, GROUP))[..., 0]
        return [torch.empty(*groups.shape, GROUP // 2, device="meta"), groups]

    def read_config(self, settings: dict[str, Any], path: Path) -> GptOssConfig:
        config = super().read_config(settings, path)
        check_rules(PACKED_RULES, config, path=path)
        return config


PACKED = PackedGptOss()

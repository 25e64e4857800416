"""Gemma 3's text models as transformers has it: names and the fields of config.json; the layout is that of LLaMA."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from dtgpt.interop.foreign import checked
from dtgpt.interop.hf.architecture import read_activation, write_activation
from dtgpt.interop.hf.llama import TIED, Family, LikeLlama, read_pattern, read_shape, write_pattern, write_shape
from dtgpt.interop.hf.rope import FULL, SLIDING, read_rope_of_kinds, write_rope_of_kinds
from dtgpt.interop.keys import Key, Keys, check_keys, is_off, just, not_here, read_key, whole, whole_number
from dtgpt.models.families.gemma3 import Gemma3Config
from dtgpt.models.rotary import MOST_KINDS
from dtgpt.util.rules import Is, Other, Rule, Rules, check_rules

FAMILY = Family(4, 256, 9216, 131072, 262208, hidden=2304, layers=26, heads=8, tied=True)
THETA = {FULL: 1000000.0, SLIDING: 10000.0}
LOCAL_THETA = "rope_local_base_freq"
KEYS: Keys = {
    "attention_bias": Key(is_off, not_here("the attention of dtgpt's Gemma 3 has no biases"), False),
    "final_logit_softcapping": Key(just(None), not_here("dtgpt's Gemma 3 does not cap its logits")),
    "attn_logit_softcapping": Key(just(None), not_here("dtgpt's Gemma 3 does not cap its scores")),
    "use_bidirectional_attention": Key(is_off, not_here("dtgpt's attention is causal"), False),
    "tie_word_embeddings": TIED._replace(default=True),
}


PERIOD = Key(whole(1, MOST_KINDS), f"; it must be between 1 and {MOST_KINDS}")


WRITTEN_RULES: Rules = (
    Rule(
        "transformers takes a Gemma 3 whose heads divide its width, but this one has {hidden_size} and {num_heads} "
        "heads; keep it as a checkpoint of dtgpt",
        Is("hidden_size", "is no multiple of", Other("num_heads")),
    ),
)


class Gemma3(LikeLlama):
    buffers = re.compile(r"rotary_emb(_local)?\.\w+|embed_tokens\.embed_scale")
    names: ClassVar[Mapping[str, str]] = {
        **LikeLlama.names,
        "norm_2": "pre_feedforward_layernorm",
        "after_1": "post_attention_layernorm",
        "after_2": "post_feedforward_layernorm",
    }

    def read_config(self, settings: dict[str, Any], path: Path) -> Gemma3Config:
        check_keys(settings, KEYS, path)
        shape = read_shape(settings, FAMILY, path)
        full, sliding = read_rope_of_kinds(settings, shape["seq_length"], path, THETA, LOCAL_THETA)
        period = read_key(settings, ("sliding_window_pattern",), PERIOD, path, 6)
        config = Gemma3Config(
            activation=read_activation(settings, "hidden_activation", "gelu_pytorch_tanh", path),
            attention_scalar=whole_number(settings, ("query_pre_attn_scalar",), 256, path),
            rope_local_theta=sliding["rope_theta"],
            **shape,
            **read_pattern(settings, shape["num_layers"], 4096, "L" * (period - 1) + "G", path),
            **full,
        )
        return checked(config, path)

    def write_config(self, config: Gemma3Config) -> dict[str, Any]:
        check_rules(WRITTEN_RULES, config)
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            **write_shape(config),
            "hidden_activation": write_activation(config.activation),
            "attention_bias": False,
            "query_pre_attn_scalar": config.attention_scalar,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
            **write_pattern(config),
            **write_rope_of_kinds(config, config.rope_local_theta, LOCAL_THETA),
        }

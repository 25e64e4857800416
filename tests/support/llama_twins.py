"""dtgpt's LLaMA, Mistral and Qwen3 as models of transformers, in its names and layouts. Used by tests only; written
from the formats, not from dtgpt's own converter."""

from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dtgpt.models.decoder import Decoder
from dtgpt.models.llama import LlamaConfig as OurConfig

FAMILIES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
PLAIN = {
    "attn.proj": "self_attn.o_proj", "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm",
    "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm", "mlp.down": "mlp.down_proj",
}  # fmt: skip
ENDS = {"embedding.tokens": "model.embed_tokens", "head.norm": "model.norm", "head.output": "lm_head"}


def translate(config: OurConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights (or gradients) by dtgpt's parameter names under the names of transformers."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module in ENDS:
            whole = module == "head.norm"
            out[f"{ENDS[module]}.weight"] = tensor if whole else tensor[: config.vocab_size]
            continue
        _, layer, own = module.split(".", 2)
        at = f"model.layers.{layer}"
        if own == "attn.qkv":
            groups = tensor.view(config.num_kv_heads, -1, config.head_dim, config.hidden_size)
            pieces = {"q": groups[:, :-2], "k": groups[:, -2], "v": groups[:, -1]}
            out |= {f"{at}.self_attn.{n}_proj.weight": t.reshape(-1, config.hidden_size) for n, t in pieces.items()}
        elif own == "mlp.gate_up":
            out[f"{at}.mlp.gate_proj.weight"], out[f"{at}.mlp.up_proj.weight"] = tensor[::2], tensor[1::2]
        else:
            out[f"{at}.{PLAIN[own]}.weight"] = tensor
    return out


def twin_of(model: Decoder, family: str) -> nn.Module:
    """Return the model of transformers with the weights of `model`."""
    config = model.config
    scaling = None
    if config.rope_factor > 1:
        scaling = {
            "rope_type": "llama3", "factor": config.rope_factor, "low_freq_factor": config.rope_low_frequency,
            "high_freq_factor": config.rope_high_frequency,
            "original_max_position_embeddings": config.rope_original_length,
        }  # fmt: skip
    make_config, make_model = FAMILIES[family]
    twin = make_model(
        make_config(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.ffn_hidden_size,
            num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim,
            max_position_embeddings=config.seq_length, rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tied, rope_theta=config.rope_theta, rope_scaling=scaling,
            attn_implementation="eager", **({"sliding_window": None} if family == "mistral" else {}),
        )
    )  # fmt: skip
    weights = translate(config, {name: p.detach() for name, p in model.named_parameters()})
    missing, unexpected = twin.load_state_dict(weights, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected, (missing, unexpected)
    twin.tie_weights()
    return twin

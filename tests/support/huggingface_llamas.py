"""Small LLaMAs, Mistrals and Qwen3s as transformers makes them, and as dtgpt does. Used by tests only."""

import torch
import transformers

from dtgpt.models.llama import LlamaConfig
from dtgpt.ops.random.philox import root_key
from tests.interop.test_interop_huggingface import scatter
from tests.support.whole_model import build_model

SIZES = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0,
    "mscale": 0.7, "mscale_all_dim": 1.1,
}  # fmt: skip
MODELS = {
    "llama 2": ("Llama", {}),
    "llama 3": ("Llama", {"num_key_value_heads": 2, "rms_norm_eps": 1e-3, "rope_parameters": {"rope_theta": 5e5}}),
    "llama 3.1": ("Llama", {"num_key_value_heads": 1, "rope_parameters": LLAMA31}),
    "llama 3.2": ("Llama", {"num_key_value_heads": 2, "rope_parameters": LLAMA31, "tie_word_embeddings": True}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}}),
    "yarn": ("Llama", {"num_key_value_heads": 2, "rope_parameters": YARN}),
    "biases": ("Llama", {"attention_bias": True, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 2}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": None}),
    "window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 7}),
    "odd width": ("Mistral", {"num_key_value_heads": 2, "head_dim": 10, "hidden_size": 42, "sliding_window": 64}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2 windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 32, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen3 windows": (
        "Qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 5,
            "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3 tied": ("Qwen3", {"num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": True}),
}


def their_model(kind="llama 3.2", **settings):
    name, own = MODELS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **own, **settings})
    return scatter(getattr(transformers, f"{name}ForCausalLM")(config))


def our_model(**settings):
    sizes = {"num_layers": 2, "hidden_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "seq_length": 24}
    config = LlamaConfig(**{**sizes, "ffn_hidden_size": 40, "vocab_size": 131, "init_std": 0.3, **settings})
    return scatter(build_model(config, torch.device("cpu"), torch.float32, root_key(3)))

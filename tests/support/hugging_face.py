"""dtgpt's weights in the names and layouts of Hugging Face's GPT-2. Used by tests only."""

import torch
from einops import rearrange
from transformers import GPT2Config, GPT2LMHeadModel

from dtgpt.models.decoder import Decoder

BLOCK_NAMES = {
    "ln_1": "ln_1", "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj", "ln_2": "ln_2", "mlp.fc": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}  # fmt: skip


def translate(model: Decoder, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights (or gradients) by dtgpt's parameter names -> the same by Hugging Face's."""
    config, out = model.config, {}
    for name, tensor in tensors.items():
        if name == "embedding.wte.weight":
            out["transformer.wte.weight"] = tensor[: config.vocab_size]
        elif name == "embedding.wpe.weight":
            out["transformer.wpe.weight"] = tensor
        elif name.startswith("head.ln_f"):
            out[name.replace("head.", "transformer.")] = tensor
        else:
            _, layer, *middle, kind = name.split(".")
            middle = ".".join(middle)
            if middle == "attn.qkv":  # ours is per head, [N, 3, D]; theirs is [3, N, D]
                tensor = rearrange(tensor, "(n three d) ... -> (three n d) ...", n=config.num_heads, three=3)
            if kind == "weight" and "ln" not in middle:  # their Conv1D is a transposed Linear
                tensor = tensor.T
            out[f"transformer.h.{layer}.{BLOCK_NAMES[middle]}.{kind}"] = tensor
    return out


def hugging_face_twin(model: Decoder) -> GPT2LMHeadModel:
    """GPT2LMHeadModel with the weights of `model`, without dropout."""
    config = model.config
    twin = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size, n_positions=config.seq_length, n_embd=config.hidden_size,
            n_layer=config.num_layers, n_head=config.num_heads, activation_function="gelu_new",
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, layer_norm_epsilon=config.layer_norm_eps,
        )
    )  # fmt: skip
    weights = translate(model, {name: p.detach() for name, p in model.named_parameters()})
    missing, unexpected = twin.load_state_dict(weights, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected, (missing, unexpected)
    twin.tie_weights()
    return twin

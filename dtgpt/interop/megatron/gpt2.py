"""GPT-2 in checkpoints of Megatron-LM: names, order and args."""

from argparse import Namespace
from typing import Any

from einops import rearrange
from torch import Tensor

from dtgpt.data.library_tokenizers.unpickler import StandIn
from dtgpt.interop.foreign import checked
from dtgpt.interop.keys import EPSILON, Key, among, check_keys, read_key, whole_number
from dtgpt.interop.megatron.architecture import Order, StoredShapes, Values, check_agreement, check_fields_written
from dtgpt.interop.megatron.names import Family, Modules
from dtgpt.models.gpt2 import GPT2_124M, TABLE, GPT2Config
from dtgpt.util.errors import UserError

TITLE = "GPT-2"
HAS = "learned positions, LayerNorm, biases, plain attention, a GELU MLP of 4 times the hidden size and tied embeddings"
MODULES: Modules = {
    "tokens": "embedding.wte",
    "positions": "embedding.wpe",
    "attention_norm": "ln_1",
    "qkv": "attn.qkv",
    "attention_output": "attn.proj",
    "mlp_norm": "ln_2",
    "mlp_input": "mlp.fc",
    "mlp_output": "mlp.proj",
    "final_norm": "head.ln_f",
    "output": "head.lm_head",
}
FAMILY: Family = "nested"
VOCABULARIES: tuple[int, ...] = (GPT2_124M.vocab_size,)
POSITIONS = "embedding.wpe.weight"
HEAD_DIM = 64  # of every published GPT-2

# None: the version had no such argument.
VALUES: Values = {
    "normalization": ((None, "LayerNorm"), "another norm"),
    "swiglu": ((None, False), "SwiGLU"),
    "use_rotary_position_embeddings": ((None, False), "RoPE"),
    "add_position_embedding": ((None, True), "no learned positions"),
    "add_bias_linear": ((None, True), "no biases"),
    "disable_bias_linear": ((None, False), "no biases"),
    "untie_embeddings_and_output_weights": ((None, False), "an untied output layer"),
    "qk_layernorm": ((None, False), "norms of queries and keys"),
}


def lacks(args: Namespace) -> dict[str, str]:
    found = {}
    positions = getattr(args, "position_embedding_type", None)
    if not isinstance(positions, StandIn) and positions not in (None, "learned_absolute", "absolute"):
        found["position_embedding_type"] = "RoPE" if positions == "rope" else "other positions"
    heads = getattr(args, "num_attention_heads", None)
    if getattr(args, "group_query_attention", False) and getattr(args, "num_query_groups", None) != heads:
        found["num_query_groups"] = "grouped queries"
    return found


def read_config(args: Namespace | None, facts: StoredShapes) -> tuple[GPT2Config, list[str]]:
    path, (rows, hidden) = facts.path, facts.shapes[TABLE]
    if len(facts.shapes.get(POSITIONS, ())) != 2:
        raise UserError(f"{path} has no {POSITIONS} of two dimensions; give a GPT-2 with learned positions")
    positions = facts.shapes[POSITIONS][0]
    notes: list[str] = []
    if args is None:
        if hidden % HEAD_DIM:
            raise UserError(
                f"{path} has no args, and hidden size {hidden} is not a multiple of {HEAD_DIM}, so its attention heads "
                "are unknown; save it with args"
            )
        heads, eps = hidden // HEAD_DIM, GPT2Config.layer_norm_eps
        notes.append(f"{path} says nothing of attention heads; {hidden} / {HEAD_DIM} = {heads} were taken")
    else:
        check_agreement(args, {"max_position_embeddings": positions}, path)
        heads = whole_number(vars(args), ("num_attention_heads",), None, path)
        eps = read_key(vars(args), ("norm_epsilon", "layernorm_epsilon"), EPSILON, path, GPT2Config.layer_norm_eps)
        sizes = {"ffn_hidden_size": 4 * hidden, "kv_channels": hidden // max(heads, 1)}
        check_keys(vars(args), {name: _has(size) for name, size in sizes.items()}, path)
    config = GPT2Config(
        num_layers=facts.num_layers,
        hidden_size=hidden,
        num_heads=heads,
        seq_length=positions,
        vocab_size=rows * facts.tensor_parallel_size,
        layer_norm_eps=eps,
        activation="gelu" if _exact_gelu(args) else "gelu_tanh",
    )
    return checked(config, path), notes


def _has(size: int) -> Key:
    return Key(among((None, size)), f", and dtgpt's GPT-2 has {size}; give a GPT-2")


def _exact_gelu(args: Namespace | None) -> bool:
    """Return whether the model has the exact GELU: Megatron-LM's fused one and OpenAI's are the tanh form."""
    return getattr(args, "bias_gelu_fusion", None) is False and not getattr(args, "openai_gelu", False)


def to_ours(piece: Tensor, name: str, config: GPT2Config, order: Order) -> Tensor:
    if order.qkv is None or ".attn.qkv." not in name:
        return piece
    return rearrange(piece, order.qkv, three=3, d=config.head_dim)


def to_theirs(piece: Tensor, name: str, config: GPT2Config) -> Tensor:
    return piece


def cut_sizes(config: GPT2Config, ranks: int) -> dict[str, int]:
    return {"num_heads": config.num_heads}


def check_export(config: GPT2Config) -> list[str]:
    if config.activation != "gelu":
        check_fields_written(config, {"activation": "gelu_tanh"})
    return []


def write_args(config: GPT2Config) -> dict[str, Any]:
    gpt2 = config.vocab_size == GPT2_124M.vocab_size
    return {
        "tokenizer_type": "GPT2BPETokenizer" if gpt2 else "NullTokenizer",
        "vocab_size": None if gpt2 else config.vocab_size - 1,  # NullTokenizer added the end of text then
        "ffn_hidden_size": 4 * config.hidden_size,
        "kv_channels": config.head_dim,
        "group_query_attention": False,
        "num_query_groups": 1,
        "position_embedding_type": "learned_absolute",
        "use_rotary_position_embeddings": False,
        "normalization": "LayerNorm",
        "layernorm_epsilon": config.layer_norm_eps,
        "add_bias_linear": True,
        "swiglu": False,
        "bias_gelu_fusion": config.activation == "gelu_tanh",  # the fused GELU is the tanh form
        "untie_embeddings_and_output_weights": False,
    }

"""LLaMA, Mistral, Qwen2.5 and Qwen3 in checkpoints of Megatron-LM: names, order and args."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from einops import rearrange
from torch import Tensor

from dtgpt.interop.foreign import checked
from dtgpt.interop.keys import EPSILON, Key, number, read_key, whole_number
from dtgpt.interop.megatron.architecture import Order, StoredShapes, Values, check_fields_written
from dtgpt.interop.megatron.names import Family, Modules
from dtgpt.models.llama import LlamaConfig
from dtgpt.models.rotary import RotaryConfig
from dtgpt.util.errors import UserError

TITLE = "LLaMA"
HAS = "rotary positions, RMSNorm, SwiGLU and no biases but those of queries, keys and values"
MODULES: Modules = {
    "tokens": "embedding.tokens",
    "attention_norm": "norm_1",
    "qkv": "attn.qkv",
    "q_norm": "attn.q_norm",
    "k_norm": "attn.k_norm",
    "attention_output": "attn.proj",
    "mlp_norm": "norm_2",
    "mlp_input": "mlp.gate_up",
    "mlp_output": "mlp.down",
    "final_norm": "head.norm",
    "output": "head.output",
}
FAMILY: Family = "local"
VOCABULARIES: tuple[int, ...] = (32000, 32768, 128256, 151936)  # Llama 2, Mistral 0.3, Llama 3, Qwen3

VALUES: Values = {
    "normalization": (("RMSNorm",), "another norm"),
    "swiglu": ((True,), "another MLP"),
    "glu_linear_offset": ((None, 0.0), "an offset in SwiGLU"),
    "rotary_percent": ((None, 1.0), "rotation of a part of each head"),
    "rotary_seq_len_interpolation_factor": ((None, 1), "interpolated positions"),
    "rope_type": ((None, "rope"), "another rotation"),
    "no_rope_freq": ((None,), "layers without rotation"),
}
SCALED_LENGTH, LOW_FREQUENCY, HIGH_FREQUENCY = 8192, 1.0, 4.0  # of --use-rope-scaling, where they are constants
FACTOR = 8.0  # pretrain_gpt.py of Megatron-LM computes with it and ignores --rope-scaling-factor


FROM_ONE = Key(number(1), "; it must be a number of 1 or more")


def lacks(args: Namespace) -> dict[str, str]:
    found = {}
    positions = getattr(args, "position_embedding_type", None)
    if getattr(args, "use_rotary_position_embeddings", None) is not True and positions != "rope":
        found["position_embedding_type"] = "positions that are not rotary"
    if getattr(args, "add_bias_linear", None) is not False and getattr(args, "disable_bias_linear", None) is not True:
        found["add_bias_linear"] = "biases"
    return found


def read_config(args: Namespace | None, facts: StoredShapes) -> tuple[LlamaConfig, list[str]]:
    assert args is not None  # by which this architecture was chosen
    given, path = vars(args), facts.path
    config = LlamaConfig(
        qk_norm=given.get("qk_layernorm") is True,
        attention_bias="qkv" if given.get("add_qkv_bias") is True else "none",
        ffn_hidden_size=whole_number(given, ("ffn_hidden_size",), None, path),
        **read_fields(given, facts),
    )
    check_order(checked(config, path), facts)
    return config, factor_notes(config)


def read_fields(given: Mapping[str, Any], facts: StoredShapes) -> dict[str, Any]:
    """Return the fields that families with these args have in common, but for those of MLPs."""
    path = facts.path
    rows, hidden = facts.shapes["embedding.tokens.weight"]
    heads = whole_number(given, ("num_attention_heads",), None, path)
    grouped = given.get("group_query_attention") is True
    tied = not given.get("untie_embeddings_and_output_weights", facts.untied)
    scaled = given.get("use_rope_scaling") is True
    return {
        "num_layers": facts.num_layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": whole_number(given, ("num_query_groups",), None, path) if grouped else heads,
        "head_dim": whole_number(given, ("kv_channels",), hidden // max(heads, 1), path),
        "seq_length": whole_number(given, ("max_position_embeddings", "seq_length"), None, path),
        "vocab_size": rows * facts.tensor_parallel_size,
        "tied": tied,
        "norm_eps": read_key(given, ("norm_epsilon", "layernorm_epsilon"), EPSILON, path, LlamaConfig.norm_eps),
        "rope_theta": float(read_key(given, ("rotary_base",), FROM_ONE, path, LlamaConfig.rope_theta)),
        "rope_factor": float(read_key(given, ("rope_scaling_factor",), FROM_ONE, path, FACTOR)) if scaled else 1.0,
        "rope_low_frequency": LOW_FREQUENCY,
        "rope_high_frequency": HIGH_FREQUENCY,
        "rope_original_length": SCALED_LENGTH,
    }


def check_order(config: RotaryConfig, facts: StoredShapes) -> None:
    """Raise UserError where a rank's part of QKV lies in an order that cannot be changed by itself."""
    if facts.order.qkv and config.num_kv_heads != config.num_heads:
        raise UserError(
            f"{facts.path} is of a checkpoint_version before 2.0, which has no grouped queries, but its args have "
            f"num_query_groups={config.num_kv_heads}; give a file that Megatron-LM wrote"
        )
    if facts.order.rotary_interleaved and config.num_kv_heads % facts.tensor_parallel_size:
        raise UserError(
            f"{facts.path} has rotary_interleaved=True and {config.num_kv_heads} query groups on "
            f"{facts.tensor_parallel_size} ranks, which cut heads; save it with tensor_model_parallel_size="
            f"{config.num_kv_heads} or less"
        )


def factor_notes(config: RotaryConfig) -> list[str]:
    """Return a note where a scaling of positions is one that Megatron-LM stores, but does not compute."""
    if config.rope_factor in (1.0, FACTOR):
        return []
    return [
        f"rope_scaling_factor={config.rope_factor:g} is what dtgpt computes with, while pretrain_gpt.py of Megatron-LM "
        f"takes {FACTOR:g} whatever the option says; their logits differ slightly"
    ]


def to_ours(piece: Tensor, name: str, config: RotaryConfig, order: Order) -> Tensor:
    if ".gate_up." in name:
        return rearrange(piece, "(two f) ... -> (f two) ...", two=2)  # each rank stores its gates, then its ups
    if ".attn.qkv." in name and order.qkv:
        piece = rearrange(piece, order.qkv, three=3, d=config.head_dim)
    if ".attn.qkv." in name and order.rotary_interleaved:
        heads = rearrange(
            piece, "(g parts d) ... -> g parts d ...", d=config.head_dim, parts=parts_of_group(config)
        ).clone()
        heads[:, :-1] = rearrange(heads[:, :-1], "g parts (half two) ... -> g parts (two half) ...", two=2)
        return heads.flatten(0, 2)
    if (".attn.q_norm." in name or ".attn.k_norm." in name) and order.rotary_interleaved:
        return rearrange(piece, "(half two) -> (two half)", two=2)
    return piece


def to_theirs(piece: Tensor, name: str, config: RotaryConfig) -> Tensor:
    return rearrange(piece, "(f two) ... -> (two f) ...", two=2) if ".gate_up." in name else piece


def parts_of_group(config: RotaryConfig) -> int:
    return config.num_heads // config.num_kv_heads + 2


def cut_sizes(config: LlamaConfig, ranks: int) -> dict[str, int]:
    return cut_heads(config, ranks) | {"ffn_hidden_size": config.ffn_hidden_size}


def cut_heads(config: RotaryConfig, ranks: int) -> dict[str, int]:
    """Return the numbers of heads that this number of tensor-parallel ranks has to divide."""
    sizes = {"num_heads": config.num_heads}
    groups, rows = config.num_kv_heads, config.num_kv_heads * parts_of_group(config) * config.head_dim
    # More ranks than groups share these: each stores equally many rows, and gathers what it needs.
    return sizes if ranks % groups == rows % ranks == 0 else sizes | {"num_kv_heads": groups}


def check_export(config: LlamaConfig) -> list[str]:
    if config.attention_bias == "all":
        check_fields_written(config, {"attention_bias": "none"})
    return check_shape(config)


def check_shape(config: RotaryConfig) -> list[str]:
    """Return notes on the fields of `read_fields`. Raise UserError for those that Megatron-LM cannot compute."""
    check_fields_written(config, {"activation": "silu"})
    if config.window < config.seq_length:
        check_fields_written(config, {"window": 0})
    if config.rope_factor != 1 or config.rotation.amplitude != 1:
        check_fields_written(config, {"rope_scaling": "llama3"})
    constants = {
        "rope_low_frequency": LOW_FREQUENCY,
        "rope_high_frequency": HIGH_FREQUENCY,
        "rope_original_length": SCALED_LENGTH,
    }
    if config.rope_factor != 1:
        check_fields_written(config, constants, "--use-rope-scaling always has")
    return factor_notes(config)


def write_args(config: LlamaConfig) -> dict[str, Any]:
    return {
        **write_fields(config),
        "add_qkv_bias": config.attention_bias == "qkv",
        "qk_layernorm": config.qk_norm,
    }


def write_fields(config: RotaryConfig) -> dict[str, Any]:
    """Return the args that `read_fields` reads, and those that a LLaMA always has."""
    whole = config.rope_theta.is_integer()
    return {
        "tokenizer_type": "NullTokenizer",
        "vocab_size": config.vocab_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "kv_channels": config.head_dim,
        "group_query_attention": config.num_kv_heads != config.num_heads,
        "num_query_groups": config.num_kv_heads if config.num_kv_heads != config.num_heads else 1,
        "position_embedding_type": "rope",
        "rotary_base": int(config.rope_theta) if whole else config.rope_theta,
        "rotary_interleaved": False,
        "use_rope_scaling": config.rope_factor != 1,
        "rope_scaling_factor": config.rope_factor if config.rope_factor != 1 else FACTOR,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.norm_eps,
        "add_bias_linear": False,
        "swiglu": True,
        "bias_gelu_fusion": False,
        "untie_embeddings_and_output_weights": not config.tied,
    }

"""The shape of a GPT-2 from Megatron-LM's `args`, or from its tensors where a release has none. Refuse other models."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dtgpt.interop.foreign import checked, epsilon, whole_number
from dtgpt.interop.megatron.names import POSITIONS, padded_rows
from dtgpt.models.gpt2 import GPT2_124M, TABLE, GPT2Config
from dtgpt.util.errors import UserError, shown, shown_name
from dtgpt.util.pickles import StandIn

GPT2_VOCABULARY = GPT2_124M.vocab_size
HEAD_DIM = 64  # of every published GPT-2

# What each rank's args must agree on with the first rank's.
ZERO_CENTERED = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")  # the name until 2026, and since
STRUCTURE = (
    "num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "padded_vocab_size",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", *ZERO_CENTERED,
)  # fmt: skip

# args -> the only values with which a model is a GPT-2, None where the version had no such argument; and what it has
# with others.
GPT2_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "normalization": ((None, "LayerNorm"), "another norm"),
    "swiglu": ((None, False), "SwiGLU"),
    "squared_relu": ((None, False), "squared ReLU"),
    "quick_geglu": ((None, False), "GEGLU"),
    "glu_activation": ((None, False), "a gated MLP"),
    "activation_func_clamp_value": ((None,), "clamped activations"),
    "use_rotary_position_embeddings": ((None, False), "RoPE"),
    "add_position_embedding": ((None, True), "no learned positions"),
    "add_bias_linear": ((None, True), "no biases"),
    "disable_bias_linear": ((None, False), "no biases"),
    "untie_embeddings_and_output_weights": ((None, False), "an untied output layer"),
    "apply_residual_connection_post_layernorm": ((None, False), "residuals of normalized values"),
    "multi_latent_attention": ((None, False), "latent attention"),
    "qk_layernorm": ((None, False), "norms of queries and keys"),
    "qk_l2_norm": ((None, False), "norms of queries and keys"),
    "softmax_type": ((None, "vanilla"), "another softmax"),
    "attention_output_gate": ((None, False), "gated attention"),
    "experimental_attention_variant": ((None,), "another attention"),
    "linear_attention_freq": ((None,), "linear attention"),
    "window_size": ((None,), "sliding windows"),
    "use_mup": ((None, False), "the scales of muP"),
    "is_hybrid_model": ((None, False), "other layers than a transformer's"),
    "mtp_num_layers": ((None, 0), "prediction of several tokens"),
}

EXACT_GELU_NOTE = (
    "the checkpoint was trained with exact GELU (no bias_gelu_fusion, no openai_gelu) and dtgpt computes the tanh form "
    "of GPT-2; the two are at most 0.0005 apart, so logits and losses differ slightly from Megatron-LM's"
)


def read_config(
    args: Namespace | None, first: Mapping[str, Tensor], num_layers: int, tensor_parallel_size: int, path: Path
) -> tuple[GPT2Config, list[str]]:
    """Return the config, whose vocabulary is all rows of the table, and notes. `first`: the tensors of the first
    stage's first rank, with the token table `[rows, H]` and the positions `[T, H]`. Raise UserError, also where args
    and tensors disagree."""
    rows, hidden = first[TABLE].shape
    positions = first[POSITIONS].shape[0]
    found = {
        "num_layers": num_layers,
        "hidden_size": hidden,
        "max_position_embeddings": positions,
        "padded_vocab_size": rows * tensor_parallel_size,
    }
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
        _check_agreement(args, found, path)
        heads = whole_number(vars(args), ("num_attention_heads",), None, path)
        eps = epsilon(vars(args), ("norm_epsilon", "layernorm_epsilon"), GPT2Config.layer_norm_eps, path)
        for name, width in (("ffn_hidden_size", 4 * hidden), ("kv_channels", hidden // max(heads, 1))):
            if getattr(args, name, None) not in (None, width):
                raise UserError(
                    f"{path} has {name}={shown_name(getattr(args, name))}, and dtgpt's model has {width}; give a GPT-2"
                )
        if getattr(args, "bias_gelu_fusion", None) is False and not getattr(args, "openai_gelu", False):
            notes.append(EXACT_GELU_NOTE)
    config = GPT2Config(
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        seq_length=positions,
        vocab_size=found["padded_vocab_size"],
        layer_norm_eps=eps,
    )
    return checked(config, path), notes


def true_vocabulary(
    given: int | None, rows: int, args: Namespace | None, tensor_parallel_size: int
) -> tuple[int, list[str]]:
    """Return the vocabulary size without padding, of a table of `rows` rows, and notes. Raise UserError for a given
    number that does not fit the table."""
    if given is not None:
        if not 1 <= given <= rows:
            raise UserError(f"true_vocab_size={given} is not within the checkpoint's table; use 1 to {rows}")
        return given, []
    multiple = getattr(args, "make_vocab_size_divisible_by", None)
    multiple = multiple if isinstance(multiple, int) and multiple > 0 else 128
    if rows == padded_rows(GPT2_VOCABULARY, tensor_parallel_size, multiple):
        note = (
            f"the table has {rows} rows, to which Megatron-LM pads GPT-2's {GPT2_VOCABULARY} tokens; the others were "
            "left out (true_vocab_size says otherwise)"
        )
        return GPT2_VOCABULARY, [note]
    return rows, []


def _check_agreement(args: Namespace, found: Mapping[str, int], path: Path) -> None:
    for name, value in found.items():
        if name == "padded_vocab_size" and getattr(args, name, None) is None:
            continue  # known only where a tokenizer was built
        if whole_number(vars(args), (name,), None, path) != value:
            raise UserError(
                f"{path} has args with {name}={shown(getattr(args, name))}, but the checkpoint's tensors have {value}; "
                "give a folder with one complete checkpoint in it"
            )


def refuse_others(args: Namespace, path: Path) -> None:
    """Raise UserError where args describe a model that is not GPT-2, with all that dtgpt's model lacks for it."""
    lacks = {name: lack for name, (values, lack) in GPT2_VALUES.items() if getattr(args, name, None) not in values}
    positions = getattr(args, "position_embedding_type", None)
    if not isinstance(positions, StandIn) and positions not in (None, "learned_absolute", "absolute"):
        lacks["position_embedding_type"] = "RoPE" if positions == "rope" else "other positions"
    heads = getattr(args, "num_attention_heads", None)
    if getattr(args, "group_query_attention", False) and getattr(args, "num_query_groups", None) != heads:
        lacks["num_query_groups"] = "grouped queries"
    experts = getattr(args, "num_experts", None)
    if any(isinstance(n, int) and n > 1 for n in (experts if isinstance(experts, list) else [experts])):
        lacks["num_experts"] = "experts"
    if lacks:
        words = ", ".join(f"{lack} ({name}={shown_name(getattr(args, name))})" for name, lack in lacks.items())
        raise UserError(
            f"{path} is of a model with {words}, which dtgpt does not have: its model is GPT-2, with learned "
            "positions, LayerNorm, biases, plain attention, a tanh-GELU MLP of 4 times the hidden size and tied "
            "embeddings; give a checkpoint of a GPT-2"
        )

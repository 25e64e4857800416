"""The architecture of a Megatron-LM checkpoint by its `args`, and what all architectures check alike."""

from argparse import Namespace
from collections.abc import Container, Iterable
from pathlib import Path

from torch import Tensor

from dtgpt.interop.keys import Key, Keys, check_keys, is_optional_flag
from dtgpt.interop.megatron import gpt2, llama, mixtures
from dtgpt.interop.megatron.architecture import MegatronArchitecture, StoredShapes, Values, check_agreement
from dtgpt.interop.megatron.experts import has_experts
from dtgpt.interop.megatron.names import our_name, padded_rows
from dtgpt.models.config import ModelConfig
from dtgpt.models.roles import Role, role_of
from dtgpt.util.errors import UserError, shown, shown_name

DENSE: dict[str, MegatronArchitecture] = {"gpt2": gpt2, "llama": llama}  # by dtgpt's name
ARCHITECTURES: dict[str, MegatronArchitecture] = {**mixtures.FAMILIES, **DENSE}
NORMS = (Role.NORM, Role.HEAD_NORM)

# What each rank's args must agree on with the first rank's.
ZERO_CENTERED = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")  # the name until 2026, and since
STRUCTURE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "max_position_embeddings",
    "rotary_base",
    "padded_vocab_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    *ZERO_CENTERED,
)

# args -> the only values that any architecture here has, None where the version had no such argument; and what a model
# has with others.
VALUES: Values = {
    "squared_relu": ((None, False), "squared ReLU"),
    "quick_geglu": ((None, False), "GEGLU"),
    "glu_activation": ((None, False), "a gated MLP"),
    "activation_func_clamp_value": ((None,), "clamped activations"),
    "apply_residual_connection_post_layernorm": ((None, False), "residuals of normalized values"),
    "enable_mhc_connections": ((None, False), "several residual streams"),
    "multi_latent_attention": ((None, False), "latent attention"),
    "qk_l2_norm": ((None, False), "norms of queries and keys"),
    "softmax_scale": ((None,), "another scale of scores"),
    "softmax_type": ((None, "vanilla"), "another softmax"),
    "attention_output_gate": ((None, False), "gated attention"),
    "experimental_attention_variant": ((None,), "another attention"),
    "linear_attention_freq": ((None,), "linear attention"),
    "window_size": ((None,), "sliding windows"),
    "use_mup": ((None, False), "the scales of muP"),
    "is_hybrid_model": ((None, False), "other layers than a transformer's"),
    "hybrid_layer_pattern": ((None,), "other layers than a transformer's"),
    "hybrid_override_pattern": ((None,), "other layers than a transformer's"),
    "heterogeneous_layers_config_path": ((None,), "layers of different kinds"),
    "heterogeneous_layers_config_encoded_json": ((None,), "layers of different kinds"),
    "mtp_num_layers": ((None, 0), "prediction of several tokens"),
}


# Arguments that are on or off, and change what a model computes without a trace in the shapes of its tensors.
FLAGS: Keys = dict.fromkeys(
    (
        "rotary_interleaved",
        "use_rope_scaling",
        "group_query_attention",
        "qk_layernorm",
        "untie_embeddings_and_output_weights",
        *ZERO_CENTERED,
    ),
    Key(is_optional_flag, ", which is neither True nor False; give the file as Megatron-LM wrote it"),
)


def choose_architecture(args: Namespace | None, path: Path) -> MegatronArchitecture:
    """Return the architecture that has all that args say; GPT-2 without args, which old releases lack. Raise UserError
    for another model, with what the closest architecture lacks for it."""
    if args is None:
        return gpt2
    check_keys(vars(args), FLAGS, path)
    experts = has_experts(vars(args))
    if experts:
        mixtures.check_args(args, path)
    known = ARCHITECTURES if experts else DENSE
    lacks = [(architecture, _lacks(args, architecture)) for architecture in known.values()]
    closest, missing = min(lacks, key=lambda pair: len(pair[1]))
    if not missing:
        return closest
    words = ", ".join(f"{lack} ({name}={shown_name(getattr(args, name, None))})" for name, lack in missing.items())
    raise UserError(
        f"{path} is of a model with {words}, which dtgpt does not have: its {closest.TITLE} has {closest.HAS}; give a "
        "checkpoint of a GPT-2, a LLaMA, a Mistral or a Qwen3, or of a mixture of experts like theirs"
    )


def _lacks(args: Namespace, architecture: MegatronArchitecture) -> dict[str, str]:
    """Return what a model with these args has and dtgpt's has not, by the name in args."""
    rules = {**architecture.VALUES, **VALUES}
    found = {name: lack for name, (values, lack) in rules.items() if getattr(args, name, None) not in values}
    experts = {"num_experts": "experts"} if architecture in DENSE.values() and has_experts(vars(args)) else {}
    return found | architecture.lacks(args) | experts


def shift_norm(stored: Tensor, name: str, args: Namespace | None, config: ModelConfig) -> Tensor:
    """Return the parameter `name` from what is stored: of the weights of norms, apply_layernorm_1p trains and stores
    the distance from 1. All others keep their bits, the sign of a zero too."""
    module, _, kind = name.rpartition(".")
    zero_centered = any(getattr(args, option, None) for option in ZERO_CENTERED)
    return stored + 1 if zero_centered and kind == "weight" and role_of(module, config.roles) in NORMS else stored


def read_config(
    architecture: MegatronArchitecture, args: Namespace | None, facts: StoredShapes
) -> tuple[ModelConfig, list[str]]:
    """Return the shape of the model, whose vocabulary is all rows of the table, and notes. Raise UserError where args
    and tensors disagree."""
    path, table = facts.path, f"{architecture.MODULES['tokens']}.weight"
    if len(facts.shapes.get(table, ())) != 2:
        raise UserError(f"{path} has no {table} of two dimensions; give a checkpoint of a {architecture.TITLE}")
    if args is not None:
        rows, hidden = facts.shapes[table]
        found = {
            "num_layers": facts.num_layers,
            "hidden_size": hidden,
            "padded_vocab_size": rows * facts.tensor_parallel_size,
        }
        check_agreement(args, found, path)
    config, notes = architecture.read_config(args, facts)
    if config.tied and facts.untied is not None:
        raise UserError(
            f"{facts.untied} has an output layer of its own (output_layer.weight), but no args that say so "
            "(untie_embeddings_and_output_weights); give a model with tied embeddings, or with the args of its training"
        )
    return config, notes


def count_layers(names: Iterable[str], path: Path) -> int:
    """Return the number of layers. Raise UserError where they are not numbered 0, 1, ..."""
    found = {int(name.split(".")[1]) for name in names if name.startswith("blocks.")}
    if found != set(range(len(found))):
        raise UserError(f"{path} lacks layers: it has {shown(sorted(found))}; copy the whole checkpoint")
    return len(found)


def name_tensor(key: str, architecture: MegatronArchitecture, known: Container[str], path: Path) -> str:
    """Return dtgpt's name of a tensor. Raise UserError for one that the architecture does not have, or that is among
    the `known`."""
    try:
        name = our_name(key, architecture.MODULES)
    except KeyError:
        raise UserError(
            f"{path} has {shown_name(key)}, which {architecture.TITLE} does not have; give a checkpoint of a "
            f"{architecture.TITLE}"
        ) from None
    if name in known:
        raise UserError(f"{path} has {name} twice, also as {shown_name(key)}; give a checkpoint as it was written")
    return name


def true_vocabulary(
    given: int | None, rows: int, args: Namespace | None, tensor_parallel_size: int, architecture: MegatronArchitecture
) -> tuple[int, list[str]]:
    """Return the vocabulary size without padding, of a table of `rows` rows, and notes. Raise UserError for a given
    number that does not fit the table."""
    if given is not None:
        if not 1 <= given <= rows:
            raise UserError(f"true_vocab_size={given} is not within the checkpoint's table; use 1 to {rows}")
        return given, []
    multiple = getattr(args, "make_vocab_size_divisible_by", None)
    multiple = multiple if isinstance(multiple, int) and multiple > 0 else 128
    for size in () if rows in architecture.VOCABULARIES else architecture.VOCABULARIES:
        if rows == padded_rows(size, tensor_parallel_size, multiple):
            note = (
                f"the table has {rows} rows, to which Megatron-LM pads {architecture.TITLE}'s {size} tokens; the "
                "others were left out (true_vocab_size says otherwise)"
            )
            return size, [note]
    return rows, []

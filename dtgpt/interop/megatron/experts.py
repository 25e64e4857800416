"""Experts in Megatron-LM's arguments and checkpoints: which family of dtgpt has them, by one table for checkpoints and
for commands, and how their matrices are stored.

A rank of an expert-parallel group holds the matrices of as many experts as each other one, numbered from 0. Three
modules of Megatron-LM store them: one module for each expert, or (--moe-grouped-gemm) the matrices of all in one
module, or, until March 2026, in one tensor whose memory is `[E, in, out]` and whose shape joins E to the dimension that
tensor parallelism cuts.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dtgpt.interop.foreign import shortest_pattern
from dtgpt.interop.keys import FLAG, NUMBER, POSITIVE, Key, Keys, is_optional_flag
from dtgpt.interop.megatron.architecture import Values
from dtgpt.models.families.qwen3_moe import WITH, WITHOUT
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.util.errors import UserError, shown, shown_name
from dtgpt.util.rules import Given, Is, Missing, Other, Rule, Rules, check_rules

Args = Mapping[str, Any]  # Megatron-LM's arguments, by their names in args; one that is missing has its default

ONE_TENSOR = re.compile(r"(.+\.mlp\.experts)\.weight([12])")
CORRECTION = "mlp.router.correction.bias"

# Family -> argument, as `described` gives it -> values that a model of the family has; what one with another has.
OFF = (None, False)
SHARED, GATE = "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"
ANY: Values = {
    "moe_router_load_balancing_type": ((None,), "a choice by optimal transport or quantiles"),
    "moe_latent_size": ((None,), "experts of a narrower stream"),
    "moe_apply_probs_on_input": (OFF, "experts whose inputs are weighed"),
}
SOFTMAX: Values = {
    **ANY,
    "moe_router_score_function": (("softmax",), "scores that are no softmax"),
    "moe_router_enable_expert_bias": (OFF, "a correction of the choice"),
    "moe_router_topk_scaling_factor": ((None,), "a factor of the weights of experts"),
    "moe_router_group_topk": ((None,), "groups of experts"),
}
OVER_CHOSEN = {"moe_router_pre_softmax": (OFF, "weights by the softmax over all experts")}
NONE_SHARED = {SHARED: ((False,), "an MLP that all tokens share")}
EVERYWHERE = {"moe_layer_freq": (("all",), "blocks without experts")}
FAMILIES: Mapping[str, Values] = {
    "mixtral": {
        **SOFTMAX,
        **OVER_CHOSEN,
        **NONE_SHARED,
        **EVERYWHERE,
        "qk_layernorm": (OFF, "norms of queries and keys"),
        "add_qkv_bias": (OFF, "biases of queries, keys and values"),
    },
    "qwen3_moe": {**SOFTMAX, **NONE_SHARED, "qk_layernorm": ((True,), "no norms of queries and keys")},
    "qwen2_moe": {
        **SOFTMAX,
        SHARED: ((True,), "no MLP that all tokens share"),
        GATE: ((True,), "no gate of a shared MLP"),
        "qk_layernorm": (OFF, "norms of queries and keys"),
    },
    "glm4_moe": {
        **ANY,
        "moe_router_score_function": (("sigmoid",), "scores that are no sigmoids"),
        GATE: (OFF, "a gate of the shared MLP"),
        "moe_layer_freq": (("all", "after the first"), "blocks without experts behind the first ones"),
        "moe_router_group_topk": ((None, "two"), "groups by the sum of other than their two best experts"),
    },
    "gpt_oss": {**SOFTMAX, **OVER_CHOSEN, **NONE_SHARED, **EVERYWHERE},
}
TITLES = {
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "qwen2_moe": "Qwen2-MoE",
    "glm4_moe": "GLM-4.5",
    "gpt_oss": "GPT-OSS",
}


def _is_pattern(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(type(each) is int and each in (0, 1) for each in value)
    return value is None or (type(value) is int and value > 0)


def _optional(key: Key) -> Key:
    return key._replace(fits=lambda value: value is None or key.fits(value))


# Of args in a checkpoint, which any program may have written.
KEYS: Keys = {
    "num_experts": POSITIVE,
    "moe_router_topk": POSITIVE._replace(default=2),
    "moe_ffn_hidden_size": _optional(POSITIVE),
    SHARED: _optional(POSITIVE),
    "moe_router_num_groups": _optional(POSITIVE),
    "moe_router_group_topk": _optional(POSITIVE),
    "moe_router_topk_scaling_factor": _optional(NUMBER),
    "moe_layer_freq": Key(_is_pattern, ", neither a number nor a 0 or 1 for each layer; give the file as it was"),
    **dict.fromkeys(
        ("moe_router_pre_softmax", "moe_router_enable_expert_bias", GATE), FLAG._replace(fits=is_optional_flag)
    ),
}


def has_experts(given: Args) -> bool:
    """Return whether arguments are of a mixture. Megatron-DeepSpeed has a list, [1] for a dense model."""
    count = given.get("num_experts")
    return any(isinstance(n, int) and n > 1 for n in (count if isinstance(count, list) else [count]))


def with_experts(given: Args) -> list[bool]:
    """Return whether each layer has experts."""
    every, layers = given.get("moe_layer_freq") or 1, given["num_layers"]
    return [layer % every == 0 for layer in range(layers)] if isinstance(every, int) else list(map(bool, every))


def described(given: Args) -> dict[str, Any]:
    """Return arguments with one value for all that are the same to a family."""
    kinds, opened = with_experts(given), given.get("moe_router_group_topk") or None
    first = kinds.index(True) if True in kinds else len(kinds)
    balanced = given.get("moe_router_load_balancing_type")
    types = balanced if isinstance(balanced, list) else [balanced]
    if opened == given.get("moe_router_num_groups"):
        opened = None  # all of them
    return {
        **given,
        "moe_layer_freq": "all" if all(kinds) else "after the first" if all(kinds[first:]) else "mixed",
        "moe_router_group_topk": opened and ("two" if given.get("moe_router_topk", 2) // opened == 2 else "others"),
        "moe_router_topk_scaling_factor": None
        if given.get("moe_router_topk_scaling_factor") in (0, 1)
        else given.get("moe_router_topk_scaling_factor"),
        "moe_router_score_function": given.get("moe_router_score_function") or "softmax",
        "moe_router_load_balancing_type": next((t for t in types if t in ("sinkhorn", "quantile_balancing")), None),
        SHARED: bool(given.get(SHARED)),
        GATE: bool(given.get(SHARED) and given.get(GATE)),
    }


def lacks_of(family: str, given: Args) -> dict[str, str]:
    """Return what a model with these arguments has and the family has not, by the argument's name."""
    values = described(given)
    return {name: lack for name, (known, lack) in FAMILIES[family].items() if values.get(name) not in known}


def fields_of(family: str, given: Args) -> dict[str, Any]:
    """Return the fields of the family's config that differ from a LLaMA's."""
    width, chosen = given["ffn_hidden_size"], given.get("moe_router_topk") or 2
    own = given.get("moe_ffn_hidden_size") or width
    found: dict[str, Any] = {"num_experts": given["num_experts"], "experts_per_token": chosen}
    if family in ("mixtral", "gpt_oss"):
        return found | {"ffn_hidden_size": own}
    biases = "qkv" if given.get("add_qkv_bias") is True else "none"
    found |= {"ffn_hidden_size": width, "expert_size": own, "attention_bias": biases}
    kinds, shared = with_experts(given), given.get(SHARED) or 0
    if family == "glm4_moe":
        grouped = described(given)["moe_router_group_topk"] is not None
        return found | {
            "shared_size": shared,
            "dense_blocks": kinds.index(True) if True in kinds else len(kinds),
            "expert_groups": given["moe_router_num_groups"] if grouped else 1,
            "open_groups": given["moe_router_group_topk"] if grouped else 1,
            "normalise_weights": chosen > 1,  # Megatron-LM leaves the weight of a single expert as it is
            "routed_factor": float(given.get("moe_router_topk_scaling_factor") or 1),
            "rotated": float(given.get("rotary_percent") or 1),
            "qk_norm": given.get("qk_layernorm") is True,
        }
    found["normalise_weights"] = given.get("moe_router_pre_softmax") is not True
    found["expert_pattern"] = shortest_pattern(kinds, WITH + WITHOUT)
    return found | ({"shared_size": shared} if family == "qwen2_moe" else {})


def args_of(config: Any) -> dict[str, Any]:
    """Return the arguments by which `fields_of` gives the fields of a config of one of these families."""
    sigmoid, routing = config.routing.score == "sigmoid", config.routing
    kinds = [config.has_experts(layer) for layer in range(config.num_layers)]
    grouped = routing.open_groups < routing.groups
    return {
        "num_experts": config.num_experts,
        "moe_router_topk": config.experts_per_token,
        "moe_ffn_hidden_size": config.expert_size,
        SHARED: config.shared_size or None,
        GATE: config.gates_shared,
        "moe_layer_freq": 1 if all(kinds) else list(map(int, kinds)),
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_pre_softmax": not sigmoid and not routing.normalised,
        "moe_router_num_groups": routing.groups if grouped else None,
        "moe_router_group_topk": routing.open_groups if grouped else None,
        "moe_router_topk_scaling_factor": routing.factor if routing.factor != 1 else None,
        "moe_router_enable_expert_bias": config.corrects_choice,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
        "rotary_percent": getattr(config, "rotated", 1.0),
        "qk_layernorm": getattr(config, "qk_norm", config.architecture == "qwen3_moe"),
        "add_qkv_bias": getattr(config, "attention_bias", "none") == "qkv",
    }


WRITTEN: Rules = (
    Rule(
        "model.normalise_weights={normalised} cannot be written for Megatron-LM, which divides the sigmoids of several "
        "experts of a token by their sum, and leaves that of a single one; use --to hf",
        Is("score", "==", "sigmoid"),
        Is("normalised", "!=", Other("several")),
    ),
    Rule(
        "model.experts_per_token=1 cannot be written for Megatron-LM with a weight of 1, which it does not have; use "
        "--to hf",
        Is("score", "!=", "sigmoid"),
        Given("normalised"),
        Missing("several"),
    ),
    Rule(
        "model.open_groups={open} of {groups} cannot be written for Megatron-LM, which opens groups by the sum of "
        "their best {best} experts, and dtgpt by that of their best 2; use --to hf",
        Is("open", "<", Other("groups")),
        Is("best", "!=", 2),
    ),
)


def check_written(config: Any) -> None:
    """Raise UserError for a config that no arguments describe."""
    routing = config.routing
    values = {
        "score": "sigmoid" if routing.score == "sigmoid" else "softmax",
        "normalised": routing.normalised or routing.score == "softmax_of_chosen",
        "several": routing.chosen > 1,
        "open": routing.open_groups,
        "groups": routing.groups,
        "best": routing.chosen // routing.open_groups,
    }
    check_rules(WRITTEN, values)


def is_left_out(name: str, given: Args | None) -> bool:
    """Return whether a file with these arguments has no such parameter: a correction that is always zero."""
    return name.endswith(CORRECTION) and not (given or {}).get("moe_router_enable_expert_bias")


def apart(chunk: Mapping[str, Tensor], given: Args, path: Path) -> dict[str, Tensor]:
    """Return the tensors of a rank, with the matrices of each expert by themselves. Raise UserError for a tensor that
    cannot hold those of all experts."""
    found: dict[str, Tensor] = {}
    for key, tensor in chunk.items():
        if (match := ONE_TENSOR.fullmatch(key)) is None:
            found[key] = tensor
            continue
        joined = 2 - int(match[2])  # the dimension
        count = experts_of_rank(given)
        if tensor.dim() != 2 or not count or not tensor.shape[joined] or tensor.shape[joined] % count:
            raise UserError(
                f"{path} has {shown_name(key)} of shape {shown(list(tensor.shape))}, in which {count} experts have no "
                "matrices of equal sizes; copy the file again, with the args of its training"
            )
        sizes = (tensor.shape[0], -1) if joined else (-1, tensor.shape[1])
        for number, matrix in enumerate(tensor.reshape(count, *sizes)):
            found[f"{match[1]}.local_experts.{number}.linear_fc{match[2]}.weight"] = matrix.t()
    return found


def expert_parallel_size(given: Args | None) -> int:
    """Return the number of expert-parallel ranks that arguments say; 1 where they say none."""
    said = (given or {}).get("expert_model_parallel_size")
    return said if type(said) is int and said > 0 else 1


def experts_of_rank(given: Args) -> int:
    """Return the number of experts of a rank; 0 where arguments say none."""
    count = given.get("num_experts")
    return count // expert_parallel_size(given) if type(count) is int and has_experts(given) else 0


def expert_sizes(config: ExpertsConfig) -> dict[str, int]:
    """Return the widths of MLPs that tensor-parallel ranks divide, by their names."""
    sizes = {"expert_size": config.expert_size} | ({"shared_size": config.shared_size} if config.shared_size else {})
    dense = not all(map(config.has_experts, range(config.num_layers)))
    return sizes | ({"ffn_hidden_size": config.ffn_hidden_size} if dense else {})

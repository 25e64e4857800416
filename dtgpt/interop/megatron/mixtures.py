"""Mixtures of experts in checkpoints of Megatron-LM: LLaMAs but for their MLPs, and what else a family has."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from torch import Tensor

from dtgpt.interop.foreign import checked
from dtgpt.interop.hf.glm4_moe import columns_there
from dtgpt.interop.keys import check_keys, whole_number
from dtgpt.interop.megatron import experts, llama
from dtgpt.interop.megatron.architecture import (
    MegatronArchitecture,
    Order,
    StoredShapes,
    Values,
    check_agreement,
    check_fields_written,
)
from dtgpt.interop.megatron.names import Family, Modules
from dtgpt.models.config import ModelConfig
from dtgpt.models.families.glm4_moe import Glm4MoeConfig
from dtgpt.models.families.mixtral import MixtralConfig
from dtgpt.models.families.qwen2_moe import Qwen2MoeConfig
from dtgpt.models.families.qwen3_moe import Qwen3MoeConfig
from dtgpt.util.errors import UserError

PARTLY = "rotary_percent"
# Of args: what changes how a checkpoint stores a model.
STORED: Values = {
    "moe_extended_tp": ((None, False), "experts that are cut over all ranks"),
    "moe_mlp_glu_interleave_size": ((None,), "gates and ups in blocks"),
    "moe_shared_expert_glu_interleave_size": ((None,), "gates and ups in blocks"),
    "moe_single_grouped_weight": ((None, False), "matrices of experts in an order of Transformer Engine's"),
}


MODULES: Modules = {
    **llama.MODULES,
    "router": "mlp.router",
    "correction": "mlp.router.correction",
    "expert_input": "mlp.experts.gate_up",
    "expert_output": "mlp.experts.down",
    "shared_input": "mlp.shared.gate_up",
    "shared_output": "mlp.shared.down",
    "shared_gate": "mlp.shared_gate",
}


class Mixture:
    """A family whose blocks, or some of them, have experts. has: what else its models consist of."""

    FAMILY: Family = "local"
    VOCABULARIES = llama.VOCABULARIES

    def __init__(self, config: type[Any], has: str):
        self.name, self._config = config.architecture, config
        self.MODULES = MODULES
        self.TITLE, self.HAS = experts.TITLES[self.name], f"{llama.HAS}, {has}"
        free = (PARTLY,) if config is Glm4MoeConfig else ()
        self.VALUES: Values = {name: each for name, each in {**llama.VALUES, **STORED}.items() if name not in free}

    def lacks(self, args: Namespace) -> dict[str, str]:
        given = vars(args)
        found = llama.lacks(args) | experts.lacks_of(self.name, given)
        if given.get("rotary_interleaved") is True and given.get(PARTLY) not in (None, 1.0):
            found["rotary_interleaved"] = "neighbouring columns that rotate in a part of each head"
        cut, own = given.get("tensor_model_parallel_size"), given.get("expert_tensor_parallel_size")
        if own not in (None, cut):
            found["expert_tensor_parallel_size"] = f"experts cut over other than tensor_model_parallel_size={cut} ranks"
        return found

    def read_config(self, args: Namespace | None, facts: StoredShapes) -> tuple[ModelConfig, list[str]]:
        assert args is not None  # by which this architecture was chosen
        given = {**vars(args), "ffn_hidden_size": whole_number(vars(args), ("ffn_hidden_size",), None, facts.path)}
        routers = [shape for name, shape in facts.shapes.items() if name.endswith("mlp.router.weight")]
        if routers:
            check_agreement(args, {"num_experts": routers[0][0]}, facts.path)
        config = self._config(**llama.read_fields(given, facts), **experts.fields_of(self.name, given))
        llama.check_order(checked(config, facts.path), facts)
        if _turned(config) is not None and config.num_kv_heads % facts.tensor_parallel_size:
            raise UserError(
                f"{facts.path} has rotary_percent={config.rotated} and {config.num_kv_heads} query groups on "
                f"{facts.tensor_parallel_size} ranks, which cut heads; save it with tensor_model_parallel_size="
                f"{config.num_kv_heads} or less"
            )
        notes = llama.factor_notes(config)
        if given.get("moe_expert_capacity_factor") is not None:
            notes.append(
                f"{facts.path} was trained with moe_expert_capacity_factor, by which Megatron-LM drops tokens; dtgpt "
                "drops none, and its results differ where Megatron-LM would"
            )
        return config, notes

    def cut_sizes(self, config: Any, ranks: int) -> dict[str, int]:
        whole = {} if _turned(config) is None else {"num_kv_heads": config.num_kv_heads}
        return llama.cut_heads(config, ranks) | experts.expert_sizes(config) | whole

    def check_export(self, config: Any) -> list[str]:
        if getattr(config, "attention_bias", "none") == "all":
            check_fields_written(config, {"attention_bias": "none"})
        experts.check_written(config)
        return llama.check_shape(config)

    def write_args(self, config: Any) -> dict[str, Any]:
        return {**llama.write_fields(config), **experts.args_of(config)}

    def to_ours(self, piece: Tensor, name: str, config: Any, order: Order) -> Tensor:
        piece = llama.to_ours(piece, name, config, order)
        turned = _turned(config)
        return piece if turned is None else _of_heads(piece, name, config, turned)

    def to_theirs(self, piece: Tensor, name: str, config: Any) -> Tensor:
        piece = llama.to_theirs(piece, name, config)
        turned = _turned(config)
        return piece if turned is None else _of_heads(piece, name, config, turned.argsort())


FAMILIES: dict[str, MegatronArchitecture] = {
    mixture.name: mixture
    for mixture in (
        Mixture(MixtralConfig, "and experts in all blocks, weighed by the softmax over those chosen"),
        Mixture(Qwen3MoeConfig, "norms of queries and keys, and experts by a softmax"),
        Mixture(Qwen2MoeConfig, "experts by a softmax, and an MLP that all tokens share, with a gate"),
        Mixture(Glm4MoeConfig, "and experts by sigmoids behind first blocks without"),
    )
}


def check_args(args: Namespace, path: Path) -> None:
    """Raise UserError for args about experts that no program could have written in training, or that disagree."""
    check_keys(vars(args), experts.KEYS, path)
    given = vars(args)
    layers = whole_number(given, ("num_layers",), None, path)
    if isinstance(given.get("moe_layer_freq"), list | tuple) and len(given["moe_layer_freq"]) != layers:
        raise UserError(
            f"{path} has moe_layer_freq of {len(given['moe_layer_freq'])} layers and num_layers={layers}; give the "
            "file as Megatron-LM wrote it"
        )
    count, ranks = given["num_experts"], experts.expert_parallel_size(given)
    if count % ranks:
        raise UserError(
            f"{path} has num_experts={count}, which expert_model_parallel_size={ranks} ranks cannot share; give the "
            "file as Megatron-LM wrote it"
        )


def _turned(config: Any) -> Tensor | None:
    """Return which column of a head in Megatron-LM each one here is, int64 `[D]`; None: the same one. Where a part of a
    head rotates, its first columns do there, as in transformers."""
    return columns_there(config) if getattr(config, "rotated", 1.0) != 1 else None


def _of_heads(piece: Tensor, name: str, config: Any, order: Tensor) -> Tensor:
    """Return a parameter with columns of the heads of queries and keys in another order."""
    if ".attn.q_norm." in name or ".attn.k_norm." in name:
        return piece[order]
    if ".attn.qkv." not in name:
        return piece
    heads = piece.unflatten(0, (-1, llama.parts_of_group(config), config.head_dim)).clone()
    heads[:, :-1] = heads[:, :-1][:, :, order]
    return heads.flatten(0, 2)

"""Megatron-LM's names of parameters, and which of them tensor parallelism cuts.

Three families of names: nested dictionaries of 2019 to 2024 (`language_model.encoder.layers.0.self_attention...`, with
`transformer`, `.attention.` and a flat `word_embeddings` before 2021, and `input_norm` since 2023), mcore's flat ones
(`decoder.layers.0.self_attention.linear_qkv...`), and mcore's with Transformer Engine, where a norm belongs to the
layer that follows it, unless that is a router. Nested dictionaries are read joined by dots. Layers are numbered from 0
in every pipeline stage, and experts in every expert-parallel rank; dtgpt's names of their matrices end with `[3]`.

An architecture (`gpt2.py`, `llama.py`) says which of its modules stands at each of these places.
"""

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from dtgpt.models.config import ModelConfig
from dtgpt.models.roles import COLUMNS, ROWS, STACKS, Role, role_of

Family = Literal["nested", "local", "transformer_engine"]
Modules = Mapping[str, str]  # place -> dtgpt's module, `attn.qkv` in a block and `head.norm` outside


class ModuleNames(NamedTuple):
    """What stands before `weight` or `bias` in the name of a parameter: of each family, and others that are read."""

    nested: str
    local: str
    transformer_engine: str
    others: tuple[str, ...] = ()


def _everywhere(name: str) -> ModuleNames:
    return ModuleNames(name, name, name)


# Within a layer.
PLACES = {
    "attention_norm": ModuleNames(
        "input_layernorm.", "input_layernorm.", "self_attention.linear_qkv.layer_norm_", ("input_norm.",)
    ),
    "qkv": ModuleNames("self_attention.query_key_value.", "self_attention.linear_qkv.", "self_attention.linear_qkv."),
    "q_norm": _everywhere("self_attention.q_layernorm."),
    "k_norm": _everywhere("self_attention.k_layernorm."),
    "attention_output": ModuleNames(
        "self_attention.dense.", "self_attention.linear_proj.", "self_attention.linear_proj."
    ),
    "mlp_norm": ModuleNames(
        "post_attention_layernorm.", "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_", ("post_attention_norm.",)
    ),
    "mlp_input": ModuleNames("mlp.dense_h_to_4h.", "mlp.linear_fc1.", "mlp.linear_fc1."),
    "mlp_output": ModuleNames("mlp.dense_4h_to_h.", "mlp.linear_fc2.", "mlp.linear_fc2."),
    "router": _everywhere("mlp.router."),
    "correction": _everywhere("mlp.router.expert_"),
    "expert_input": _everywhere("mlp.experts.linear_fc1."),
    "expert_output": _everywhere("mlp.experts.linear_fc2."),
    "shared_input": _everywhere("mlp.shared_experts.linear_fc1."),
    "shared_output": _everywhere("mlp.shared_experts.linear_fc2."),
    "shared_gate": _everywhere("mlp.shared_experts.gate_"),
}
PLACE_OF = {name: place for place, names in PLACES.items() for name in (*names[:3], *names.others)}
# Outside: without `language_model.`, `embedding.` and the name of the stack of layers.
ENDS = {
    "word_embeddings": "tokens",
    "position_embeddings": "positions",
    "final_layernorm": "final_norm",
    "final_norm": "final_norm",
    "output_layer": "output",
}
STACK = re.compile(r"(?:encoder|transformer|decoder)[.]")
LAYER = re.compile(r"layers[.](\d{1,6})[.](.+[._])(weight|bias)")
END = re.compile(r"(\w+)[.](weight|bias)")
# One module for each expert, one for all with numbered matrices, and those of all in one tensor of torch_dist.
EXPERT = re.compile(
    r"(.+\.mlp\.experts\.)(?:(?:local_)?experts\.(\d{1,6})\.)?(linear_fc[12]\.(?:weight|bias))(\d{1,6})?"
)
STACKED_EXPERTS = ".mlp.experts.experts.linear_fc"
UNTIED = "language_model.output_layer.weight"  # only an untied model has it
# Second copies of the tied table on the last stage: mcore's has the name that an untied output layer also has.
TIED_COPIES = ("word_embeddings_for_head.weight", "output_layer.weight")
ANGLES = re.compile(r".*\brotary_pos_emb\.inv_freq")  # saved by some versions, though they follow from the args


def our_name(key: str, modules: Modules) -> str:
    """Return dtgpt's name of Megatron's key, with the numbers of layer and expert as they are in the file. Raise
    KeyError for a parameter that the architecture does not have."""
    if (match := EXPERT.fullmatch(key)) and (number := match[2] or match[4]):
        return of_expert(our_name(f"{match[1]}{match[3]}", modules), int(number))
    key = STACK.sub("", key.removeprefix("language_model."), count=1)
    if match := LAYER.fullmatch(key):
        return f"blocks.{int(match[1])}.{in_block(match[2], modules)}.{match[3]}"
    match = END.fullmatch(key.removeprefix("embedding."))
    if match is None:
        raise KeyError(key)
    return f"{modules[ENDS[match[1]]]}.{match[2]}"


def in_block(prefix: str, modules: Modules) -> str:
    """Return dtgpt's module in a block for what Megatron has before `weight` or `bias`: `attn.qkv` for
    `self_attention.linear_qkv.`. Raise KeyError for a module that the architecture does not have."""
    return modules[PLACE_OF[re.sub(r"^attention[.]", "self_attention.", prefix)]]


def of_expert(name: str, number: int) -> str:
    """Return the name of one expert's matrix, `name` being that of the stack."""
    return f"{name}[{number}]"


def is_matrix_of_expert(name: str) -> bool:
    return name.endswith("]")


def is_stacked_key(key: str) -> bool:
    """Return whether a key of the format `torch_dist` is of the matrices of all experts together."""
    return STACKED_EXPERTS in key


def numbered_key(key: str, number: int) -> str:
    """Return the key that one expert's matrix of such a tensor would have by itself."""
    return key.replace(STACKED_EXPERTS, STACKED_EXPERTS.replace("linear", f"{number}.linear"))


def is_stack(name: str, config: ModelConfig) -> bool:
    """Return whether a parameter is a stack, of which Megatron-LM stores the matrix of each expert."""
    return role_of(name.rpartition(".")[0], config.roles) in STACKS


def their_key(name: str, modules: Modules, family: Family) -> tuple[str, ...]:
    """Return where Megatron keeps dtgpt's parameter `name`: the keys of dictionaries in dictionaries, one key for
    mcore. The number of a layer stays, as does that of an expert."""
    if match := re.fullmatch(r"(.+)\[(\d+)\]", name):
        (key,) = their_key(match[1], modules, family)
        return (key.replace(".experts.", f".experts.local_experts.{match[2]}."),)
    module, _, kind = name.rpartition(".")
    places = {ours: place for place, ours in modules.items()}
    if match := re.fullmatch(r"blocks[.](\d+)[.](.+)", module):
        prefix = getattr(PLACES[places[match[2]]], family)
        return _in_stack(f"layers.{match[1]}.{prefix}{kind}", family)
    end = next(end for end, place in ENDS.items() if place == places[module])
    if places[module] == "final_norm":
        return _in_stack(f"{end}.{kind}", family)
    embedding = ("embedding",) if places[module] in ("tokens", "positions") else ()
    path = (*embedding, end, kind)
    return ("language_model", *path) if family == "nested" else (".".join(path),)


def _in_stack(key: str, family: Family) -> tuple[str, ...]:
    return ("language_model", "encoder", key) if family == "nested" else (f"decoder.{key}",)


def copy_key(family: Family) -> tuple[str, ...]:
    """Return where the last of several stages keeps its copy of a tied table."""
    return ("word_embeddings_for_head", "weight") if family == "nested" else ("output_layer.weight",)


def is_mcore(key: str) -> bool:
    """Return whether a key is mcore's, which always had today's order of QKV, under every version of the file."""
    return ".linear_qkv." in key


def cut_dimension(name: str, config: ModelConfig) -> int | None:
    """Return the dimension in which dtgpt's parameter `name`, or a matrix of it if it is a stack, is split into equal
    contiguous pieces over tensor-parallel ranks, or None where each has the whole."""
    module, _, kind = name.rpartition(".")
    role = role_of(module, config.roles)
    if role in (*COLUMNS, Role.COLUMN_STACK, Role.VOCABULARY, Role.OUTPUT):
        return 0
    return 1 if role in ROWS and kind.startswith("weight") else None


def padded_rows(vocab_size: int, tensor_parallel_size: int, multiple: int = 128) -> int:
    """Return the number of rows of the token table in Megatron, which depends on the plan."""
    unit = multiple * tensor_parallel_size
    return -(-vocab_size // unit) * unit

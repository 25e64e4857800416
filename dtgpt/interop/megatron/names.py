"""Megatron-LM's names and layouts of GPT-2's parameters, and dtgpt's for the same.

Three families of names: nested dictionaries of 2019 to 2023 (`language_model.encoder.layers.0.self_attention...`, with
`transformer`, `.attention.` and a flat `word_embeddings` before 2021, and `input_norm` in 2024), mcore's flat ones
(`decoder.layers.0.self_attention.linear_qkv...`), and mcore's with a LayerNorm inside the layer behind it. Nested
dictionaries are read joined by dots. Layers are numbered from 0 in every pipeline stage.
"""

import re

from einops import rearrange
from torch import Tensor

from dtgpt.models.gpt2 import TABLE

# dtgpt's name in a block -> Megatron's: first the one of 2023, which is written, then others that are read.
BLOCK_NAMES = {
    "ln_1": ("input_layernorm", "input_norm"),
    "attn.qkv": ("self_attention.query_key_value", "self_attention.linear_qkv"),
    "attn.proj": ("self_attention.dense", "self_attention.linear_proj"),
    "ln_2": ("post_attention_layernorm", "post_attention_norm", "pre_mlp_layernorm"),
    "mlp.fc": ("mlp.dense_h_to_4h", "mlp.linear_fc1"),
    "mlp.proj": ("mlp.dense_4h_to_h", "mlp.linear_fc2"),
}
BLOCK_PARAMETERS = [f"{name}.{kind}" for name in BLOCK_NAMES for kind in ("weight", "bias")]
FOLDED = {"ln_1": "self_attention.linear_qkv.layer_norm_", "ln_2": "mlp.linear_fc1.layer_norm_"}
OURS_IN_BLOCK = {
    f"{theirs}.{kind}": f"{ours}.{kind}"
    for ours, names in BLOCK_NAMES.items()
    for theirs in names
    for kind in ("weight", "bias")
} | {f"{theirs}{kind}": f"{ours}.{kind}" for ours, theirs in FOLDED.items() for kind in ("weight", "bias")}

POSITIONS = "embedding.wpe.weight"
EMBEDDINGS = {"word_embeddings.weight": TABLE, "position_embeddings.weight": POSITIONS}
LAYER = re.compile(r"(?:encoder|transformer|decoder)\.layers\.(\d{1,6})\.(.+)")
FINAL = re.compile(r"(?:encoder|transformer|decoder)\.(?:final_layernorm|final_norm)\.(weight|bias)")
# Second copies of the tied table on the last stage: mcore's has the name that an untied output layer also has.
TIED_COPIES = ("word_embeddings_for_head.weight", "output_layer.weight")

# The dimension that tensor parallelism cuts, by the end of dtgpt's name; every other parameter is on all ranks.
CUTS = {
    TABLE: 0, "attn.qkv.weight": 0, "attn.qkv.bias": 0, "attn.proj.weight": 1, "mlp.fc.weight": 0, "mlp.fc.bias": 0,
    "mlp.proj.weight": 1,
}  # fmt: skip

# How the fused QKV lies along its output, by checkpoint_version; the later order is dtgpt's.
QKV_ORDERS = {0: "(three n d) ... -> (n three d) ...", 1: "(n d three) ... -> (n three d) ...", 2: None, 3: None}


def our_name(key: str) -> str | None:
    """Return dtgpt's name of Megatron's key, with the layer's number as it is in the file; None for a copy of the tied
    table. Raise KeyError for a parameter that GPT-2 does not have."""
    if key in TIED_COPIES:
        return None
    key = key.removeprefix("language_model.")
    if match := FINAL.fullmatch(key):
        return f"head.ln_f.{match[1]}"
    if match := LAYER.fullmatch(key):
        return f"blocks.{int(match[1])}.{OURS_IN_BLOCK[re.sub(r'^attention[.]', 'self_attention.', match[2])]}"
    return EMBEDDINGS[key.removeprefix("embedding.")]


def is_mcore(key: str) -> bool:
    """Return whether a key is mcore's, which always had today's order of QKV, whatever version the file says."""
    return ".linear_qkv." in key


def cut_dimension(name: str) -> int | None:
    """Return the dimension in which dtgpt's parameter `name` is split into equal contiguous pieces over
    tensor-parallel ranks, or None where each has the whole."""
    return CUTS.get(re.sub(r"^blocks[.]\d+[.]", "", name))


def reorder_qkv(piece: Tensor, order: str | None, num_heads: int) -> Tensor:
    """Return one rank's fused QKV, weight `[3 N D, H]` or bias `[3 N D]` of its `num_heads` heads, in the order [N, 3,
    D]."""
    return piece if order is None else rearrange(piece, order, three=3, n=num_heads)


def padded_rows(vocab_size: int, tensor_parallel_size: int, multiple: int = 128) -> int:
    """Return the number of rows of the token table in Megatron, which depends on the plan."""
    unit = multiple * tensor_parallel_size
    return -(-vocab_size // unit) * unit

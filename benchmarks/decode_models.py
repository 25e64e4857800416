"""Models whose decode steps are measured, and the bytes that such a step reads."""

import math

import torch

from dtgpt.models.config import ModelConfig
from dtgpt.models.families.granitemoe import GRANITE_1B_A400M
from dtgpt.models.families.olmoe import OLMOE_1B_7B, OlmoeConfig
from dtgpt.models.gpt2 import GPT2_124M, GPT2_345M, GPT2_774M, GPT2_1558M, GPT2Config
from dtgpt.models.inventory import inventory
from dtgpt.models.llama import LLAMA3_8B, LLAMA32_1B, QWEN3_0_6B, LlamaConfig
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.models.roles import STACKS
from dtgpt.models.shared.flops import flops_per_token
from dtgpt.parallel.cache_sizes import core_sizes

TINY = GPT2Config(num_layers=2, hidden_size=32, num_heads=2, seq_length=128, vocab_size=257)
TINY_LLAMA = LlamaConfig(
    num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, ffn_hidden_size=48, seq_length=128,
    vocab_size=257,
)  # fmt: skip
TINY_OLMOE = OlmoeConfig(
    num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_hidden_size=16, num_experts=8,
    experts_per_token=2, seq_length=128, vocab_size=257,
)  # fmt: skip
MODELS: dict[str, ModelConfig] = {
    "tiny": TINY, "124m": GPT2_124M, "345m": GPT2_345M, "774m": GPT2_774M, "1558m": GPT2_1558M,
    "tiny_llama": TINY_LLAMA, "llama32_1b": LLAMA32_1B, "qwen3_0_6b": QWEN3_0_6B, "llama3_8b": LLAMA3_8B,
    "tiny_olmoe": TINY_OLMOE, "olmoe": OLMOE_1B_7B, "granite_1b_a400m": GRANITE_1B_A400M,
}  # fmt: skip


def bytes_read(config: ModelConfig, dtype: torch.dtype, batch: int, position: float) -> float:
    """Bytes of a step of `batch` sequences at `position`: the weights that it multiplies once, keys and values of each
    sequence. Of experts those that some sequence chooses: as many as are to be expected where all are as likely."""
    weights = flops_per_token(config, 0) // 6
    if isinstance(config, ExpertsConfig):
        count, chosen = config.num_experts, config.experts_per_token
        weights += (count * (1 - (1 - chosen / count) ** batch) - chosen) * weights_of_an_expert(config)
    kept = config.num_layers * sum(2 * size.heads * size.dim for size in core_sizes(config, 0, 1))
    return (weights + batch * position * kept) * dtype.itemsize


def weights_of_an_expert(config: ExpertsConfig) -> int:
    """Weights of one expert of each block."""
    parts = inventory(config)
    return sum(
        blocks * math.prod(p.shape[1:])
        for index, blocks in parts.counts.items()
        for p in parts.of_block(index)
        if p.role in STACKS
    )


def width(config: ModelConfig) -> int:
    """Columns of the heads of q."""
    return config.num_heads * config.head_dim

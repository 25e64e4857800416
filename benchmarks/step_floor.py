"""The time that a training step would take on an H200 that loses nothing."""

import math

from timing import COPY_RATE, MATRIX_RATE

from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import inventory

ATTENTION = (0.200e-3 + 0.689e-3) / (32 * 16 * 1024**2 * 64)  # s per B N T^2 D: cuDNN's forward and backward on an H200
# Elements of a token that the operations between matrices read and write in a block, by architecture.
FORWARD = {
    "gpt2": lambda c: {"first LayerNorm": 2 * c.hidden_size, "residual and second LayerNorm": 4 * c.hidden_size,
                       "GELU": 8 * c.hidden_size, "residual": 3 * c.hidden_size},
    "llama": lambda c: {"first RMSNorm": 2 * c.hidden_size, "residual and second RMSNorm": 4 * c.hidden_size,
                        "SwiGLU": 3 * c.ffn_hidden_size, "residual": 3 * c.hidden_size,
                        "heads": 2 * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim},
}  # fmt: skip
BACKWARD = {
    "gpt2": lambda c: {"GELU": 12 * c.hidden_size, "two LayerNorms, each with its residual": 8 * c.hidden_size,
                       "bias gradients of fc and qkv": 7 * c.hidden_size},
    "llama": lambda c: {"SwiGLU": 5 * c.ffn_hidden_size, "two RMSNorms, each with its residual": 8 * c.hidden_size,
                        "heads": 2 * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim},
}  # fmt: skip


def floor(config: ModelConfig, samples: int) -> dict[str, float]:
    """Seconds of a step over `samples`, by part, on an H200 that loses nothing: products at the measured rate, cuDNN's
    attention, the rest fused and bound by memory; activations of 2 bytes, no dropout. See FORWARD and BACKWARD."""
    tokens, layers, length = samples * config.seq_length, config.num_layers, config.seq_length
    matrices = sum(math.prod(shape) for shape in inventory(config).block(0).shapes.values() if len(shape) > 1)
    products = 6 * tokens * (layers * matrices + config.hidden_size * config.padded_vocab_size)
    moved = sum(sum(passes[config.architecture](config).values()) for passes in (FORWARD, BACKWARD))
    return {
        "matrix products": products / MATRIX_RATE,
        "attention": layers * ATTENTION * samples * config.num_heads * config.head_dim * length**2,
        "pointwise in blocks": layers * tokens * moved * 2 / COPY_RATE,
        "logits written, read and rewritten": 3 * tokens * config.padded_vocab_size * 2 / COPY_RATE,
        "AdamW, 28 bytes a parameter": 28 * config.num_parameters / COPY_RATE,
    }


def say_floor(config: ModelConfig, samples: int) -> None:
    parts = floor(config, samples)
    total = sum(parts.values())
    print(f"floor of a step of {samples} x {config.seq_length} tokens on one H200 (MATRIX_RATE, COPY_RATE, ATTENTION)")
    for name, seconds in (parts | {"together": total}).items():
        print(f"  {name:<36}{seconds * 1e3:9.2f} ms{seconds / total:8.1%}")
    print(f"  {samples * config.seq_length / total:,.0f} tokens/s")
    for way, passes in (("forward", FORWARD), ("backward", BACKWARD)):
        print(f"  elements of a token moved in a block, {way}: {passes[config.architecture](config)}")

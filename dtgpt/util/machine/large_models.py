"""A caution where a CPU takes minutes for a step."""

from dtgpt.models.config import ModelConfig
from dtgpt.models.shared.flops import flops_per_token
from dtgpt.util.console import parameters
from dtgpt.util.shared.words import duration

CPU_FLOPS = 1e11  # a second, of which a CPU of some cores is capable in fp32


def caution_about(model: ModelConfig, global_batch_size: int, seq_length: int) -> str:
    """Return a caution about a model that is so large that a CPU takes minutes for a step."""
    tokens = global_batch_size * seq_length
    time = duration(flops_per_token(model, seq_length) * tokens / CPU_FLOPS)
    return (
        f"a model of {parameters(model.num_parameters)} on a CPU: a step of {tokens:,} tokens takes about {time} at "
        "0.1 TFLOP/s; use a GPU, or a small model such as recipes/gpt2_tiny.py"
    )

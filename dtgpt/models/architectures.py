"""The architectures that dtgpt knows, by the name in a checkpoint's state.json."""

from dtgpt.models.config import ModelConfig
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.models.track3 import Track3Config

FIRST = "gpt2"  # of checkpoints that name none
ARCHITECTURES: dict[str, type[ModelConfig]] = {
    config.architecture: config for config in (GPT2Config, LlamaConfig, Track3Config)
}

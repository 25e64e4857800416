"""The architectures that dtgpt knows, by the name in a checkpoint's state.json."""

from dtgpt.models.config import ModelConfig
from dtgpt.models.gemma3 import Gemma3Config
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.gpt_neo import GPTNeoConfig
from dtgpt.models.gpt_oss import GptOssConfig
from dtgpt.models.llama import LlamaConfig
from dtgpt.models.olmo3 import Olmo3Config
from dtgpt.models.track3 import Track3Config

FIRST = "gpt2"  # of checkpoints that name none
ARCHITECTURES: dict[str, type[ModelConfig]] = {
    config.architecture: config
    for config in (GPT2Config, GPTNeoConfig, LlamaConfig, Olmo3Config, Gemma3Config, GptOssConfig, Track3Config)
}

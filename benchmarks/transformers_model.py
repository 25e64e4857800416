"""A model of Hugging Face's transformers of the same shape as one of dtgpt, with random weights."""

from typing import Any

from torch import nn

from dtgpt.interop.hf.model import ARCHITECTURES
from dtgpt.models.config import ModelConfig


def transformers_model(config: ModelConfig, **options: Any) -> nn.Module:
    """Make the model on torch's default device. `options`: as `from_config` takes them, such as dtype."""
    import transformers

    settings = ARCHITECTURES[config.architecture].write_config(config)
    ids = {"bos_token_id": None, "eos_token_id": None}
    theirs = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings, **ids)
    return transformers.AutoModelForCausalLM.from_config(theirs, **options)

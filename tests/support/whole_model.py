"""A whole model on one device, without a plan."""

import torch
from torch import Tensor

from dtgpt.models.binding import on_meta
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder, fill_weight, unique_parameters


def build_model(config: ModelConfig, device: torch.device, dtype: torch.dtype, key: Tensor | None) -> Decoder:
    """Return a whole model on one device, with initial weights from `key [2]`. No key: the memory is left as it is, for
    a checkpoint to fill."""
    with on_meta():  # so that nothing draws values that are replaced below
        model = Decoder(config, dtype)
    model.allocate(device)
    if key is not None:
        for name, parameter in unique_parameters(model).items():
            fill_weight(parameter, name, [range(n) for n in parameter.shape], config, key)
    return model

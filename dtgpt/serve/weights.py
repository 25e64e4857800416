"""Weights that are not finite, as those of a run that has diverged or of a damaged file: a server does not begin with
them, and doubts them where logits are not finite."""

from collections.abc import Sequence

from dtgpt.inference.request import REMEDY
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder, unique_parameters
from dtgpt.models.shared.foreign import has_vocabulary, is_finite, without_padding
from dtgpt.parallel.layout import chunk
from dtgpt.parallel.mesh import Mesh

WEIGHTS = f"the model's weights are not finite, so that it cannot be served; {REMEDY}"


def has_finite_weights(stages: Sequence[Decoder], mesh: Mesh, config: ModelConfig) -> bool:
    """Return whether the weights of this rank are finite, but for the rows that pad the vocabulary."""
    for stage in stages:
        for name, parameter in unique_parameters(stage).items():
            first = 0
            if has_vocabulary(name, config) and len(parameter) < config.padded_vocab_size:
                first = chunk(range(config.padded_vocab_size), mesh.plan.tp, mesh.place.tp).start
            if not is_finite(without_padding(parameter.detach(), name, config, first)):
                return False
    return True

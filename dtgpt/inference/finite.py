"""Logits that are not finite, as those of a run that has diverged or of a damaged file: nothing is drawn or scored."""

from collections.abc import Sequence

from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder, unique_parameters
from dtgpt.models.source import has_vocabulary, is_finite, without_padding
from dtgpt.parallel.layout import chunk
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.errors import UserError

REMEDY = "dtgpt inspect names weights that are not finite: use an earlier checkpoint, or another --precision"
LOGITS = f"the model's logits are not finite, so that no token can be drawn or scored; {REMEDY}"
WEIGHTS = f"the model's weights are not finite, so that it cannot be served; {REMEDY}"


class NotFinite(UserError):
    """Logits that are NaN or infinite. The engine and the other ranks can go on."""

    def __init__(self) -> None:
        super().__init__(LOGITS)


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

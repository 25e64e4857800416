"""The stages of a model for inference: those of training, without what training alone needs.

They stand apart from `build.py`, since a capability may make them otherwise: a step of one token is too short for the
dispatch of DTensor, and a model that is only read needs no masters, gradients or hooks.
"""

from collections.abc import Callable

from dtgpt.config.execution import Settings
from dtgpt.models.decoder import Decoder
from dtgpt.parallel.build import build_stages
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shards
from dtgpt.util import seams


def inference_stages(settings: Settings, mesh: Mesh, fill: Callable[[Shards], None]) -> list[Decoder]:
    """Return the pipeline stages of this rank for inference, with the weights that `fill` gives their shards. Their
    forward does what that of the whole stage does, but the head returns this rank's columns of the logits."""
    for make in seams.listed("inference_stages"):
        return make(settings, mesh, fill)
    stages, shards = build_stages(settings, mesh, key=None, masters=False)
    fill(shards)
    return stages

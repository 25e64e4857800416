"""The section of recipes for the loss scale of fp16."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from dtgpt.config.sections import Section
from dtgpt.util.field_types import Bounds
from dtgpt.util.rules import Changed, Is, Other, Rule, Rules

LOSS_SCALE = Bounds(2.0**-64, 2.0**64, also=", such as 65536")  # beyond these, scaled gradients leave the range of fp32
NOTES: Rules = (
    Rule(
        "{field}={value} has no effect with precision={precision}: only fp16 has one",
        Changed("loss_scale.initial", "loss_scale.window", "loss_scale.hysteresis", "loss_scale.minimum"),
        Is("precision", "!=", "fp16"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig(Section):
    """Dynamic scaling of the loss in fp16 (Micikevicius et al. 2018), with Megatron-LM's rules and defaults."""

    rules: ClassVar[Rules] = (
        Rule(
            "loss_scale.minimum={minimum} is above loss_scale.initial={initial}; lower minimum",
            Is("minimum", ">", Other("initial")),
        ),
    )

    initial: Annotated[float, "initial loss scale", LOSS_SCALE] = 2.0**32
    window: Annotated[int, "number of steps without overflow before the scale doubles", Bounds(1)] = 1000
    hysteresis: Annotated[int, "number of overflows before the scale halves", Bounds(1)] = 2
    minimum: Annotated[float, "smallest loss scale", LOSS_SCALE] = 1.0

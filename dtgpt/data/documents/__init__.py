"""Documents that meet in a window are kept apart, in positions, attention or loss."""

from dtgpt.util.seams import Capability, When

ON = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
CAPABILITY = Capability(
    masks=("dtgpt.data.documents.masks:masks_of",),
    data_checks=(When("dtgpt.data.documents.checks:check", ON),),
)

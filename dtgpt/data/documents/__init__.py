"""Documents that meet in a window are kept apart, in positions, attention or loss."""

from typing import Annotated

from dtgpt.util.seams import Capability, When


class DataFields:
    reset_position_ids: Annotated[bool, "count positions from 0 in each document"] = False
    reset_attention_mask: Annotated[bool, "let each token attend to its own document only"] = False
    eod_mask_loss: Annotated[bool, "exclude the token after an end of text from the loss"] = False


ON = tuple(DataFields.__annotations__)
CAPABILITY = Capability(
    data_fields=("dtgpt.data.documents:DataFields",),
    masks=(When("dtgpt.data.documents.masks:masks_of", ON),),
    data_checks=(When("dtgpt.data.documents.checks:check", ON),),
)

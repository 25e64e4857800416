"""Runs that begin with another model: its weights, dimensions and tokenizer (`init_from`), runs of other libraries that
go on (`resume`), and weights that a run freezes and its checkpoints leave out."""

from typing import Annotated

from dtgpt.util.seams import Capability


class DataFields:
    other_tokenizer: Annotated[
        bool,
        "train a model of init_from on tokens of another tokenizer than its own; on if an option names a tokenizer",
    ] = False


CAPABILITY = Capability(
    data_fields=("dtgpt.train.init_from:DataFields",),
    beginnings=("dtgpt.train.init_from.begin:begin",),
)

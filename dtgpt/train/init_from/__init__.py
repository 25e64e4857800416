"""Runs that begin with another model: its weights, dimensions and tokenizer (`init_from`), runs of other libraries that
go on (`resume`), and weights that a run freezes and its checkpoints leave out."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(beginnings=("dtgpt.train.init_from.begin:begin",))

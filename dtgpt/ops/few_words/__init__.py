"""Few random words on a CPU, sooner than torch has them."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(few_words=("dtgpt.ops.few_words.by_numpy:FEW_NUMBERS",))

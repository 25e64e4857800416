"""Rules of generated texts: what changes logits before a token is chosen, and strings at which a text ends."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    logit_rules=("dtgpt.inference.rules.edits:edit",),
    text_ends=("dtgpt.inference.rules.stop_strings:end_of",),
)

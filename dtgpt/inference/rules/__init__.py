"""Rules of generated texts: what changes logits before a token is chosen, and strings at which a text ends."""

from dtgpt.util.seams import Capability, When

CAPABILITY = Capability(
    options=("dtgpt.inference.rules.options:RuleOptions",),
    special_ids=("dtgpt.inference.rules.special:find_ids",),
    logit_rules=(When("dtgpt.inference.rules.edits:edit", ("edits", "ngram")),),
)

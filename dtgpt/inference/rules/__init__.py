"""Rules that change logits before a token is chosen: penalties, biases, bans."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(logit_rules=("dtgpt.inference.rules.edits:edit",))

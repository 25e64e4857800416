"""Texts that keep to a JSON schema or another grammar: what may come next is told before each step."""

from dtgpt.util.seams import Capability, When

CAPABILITY = Capability(
    options=("dtgpt.inference.grammar.options:GrammarOptions",),
    engines=("dtgpt.inference.grammar.engine:GuidedEngine",),
    schedulers=("dtgpt.inference.grammar.engine:GuidedScheduler",),
    rank_commands=("dtgpt.inference.grammar.engine:allow",),
    logit_rules=(When("dtgpt.inference.grammar.masks:mask", ("masks",)),),
)

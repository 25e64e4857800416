"""Receipts: a line for each step by which the step can be checked later, under another plan and on other machines."""

from dtgpt.util.seams import Capability, CommandEntry, When

CAPABILITY = Capability(
    sections={"receipts": "dtgpt.receipts.config:ReceiptsConfig"},
    step_states=(When("dtgpt.receipts.state:make_state", ("receipts.on",)),),
    entries={"receipts": "dtgpt.receipts.config:check_entry"},
    observers=(When("dtgpt.receipts.observer:observe", ("receipts.on",)),),
    explanations=("dtgpt.receipts.explained:EXPLANATIONS",),
    commands={
        "audit": CommandEntry(
            "dtgpt.receipts.command:command",
            "dtgpt audit RUN [--step N] [--plan PLAN]\n"
            "    check the receipts of a run, or compute a step again and compare its bits",
            place=55,
        ),
        "recompute": CommandEntry("dtgpt.receipts.command:recompute"),  # which `dtgpt audit` starts
    },
)

"""Commands and scripts of Megatron-LM, nanoGPT and llm.c, read without running them, as recipes and commands of dtgpt.
Nothing here imports torch."""

from dtgpt.util.seams import Capability, CommandEntry

CAPABILITY = Capability(
    commands={
        "translate": CommandEntry(
            "dtgpt.translate.command:command",
            "dtgpt translate SCRIPT.sh | -- COMMAND\n    make a recipe of a command of Megatron-LM, nanoGPT or llm.c",
            place=120,
        ),
    },
    explanations=("dtgpt.translate.explanations:EXPLANATIONS",),
)

"""Commands beside training and generation that belong to no other capability: data, pictures, recipes, the machine."""

from dtgpt.util.seams import Capability, CommandEntry

CAPABILITY = Capability(
    commands={
        "prepare": CommandEntry(
            "dtgpt.commands.prepare:command",
            "dtgpt prepare INPUT ... --output-prefix PREFIX\n"
            "    encode text into Megatron-LM's PREFIX_text_document.bin and .idx",
            place=10,
        ),
        "tokenizer": CommandEntry(
            "dtgpt.commands.tokenizer:command",
            "dtgpt tokenizer train INPUT ...\n    train a byte-level BPE on your own text",
            place=20,
        ),
        "plot": CommandEntry(
            "dtgpt.commands.plot:command",
            "dtgpt plot RUN [RUN ...] [--output FILE.png]\n    draw the loss curves of runs into one picture",
            place=140,
        ),
        "recipe": CommandEntry(
            "dtgpt.commands.recipe:command",
            "dtgpt recipe [NAME]\n    print a recipe file that comes with dtgpt; without NAME, list them",
            place=150,
            usage_place=24,
        ),
        "doctor": CommandEntry(
            "dtgpt.commands.doctor:command",
            "dtgpt doctor\n    check this machine: torch, GPUs, what they run, what is missing",
            place=160,
            usage_place=22,
        ),
    },
)

"""The capabilities of dtgpt: what there is beside the core. Remove a line and the folder that it names, and the core
works as before."""

# The module that describes the capability, and those of the capabilities whose modules it imports.
CAPABILITIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("dtgpt.ops.fp8", ()),
    ("dtgpt.posttrain.lora", ("dtgpt.ops.fp8",)),
    ("dtgpt.posttrain.dpo", ("dtgpt.ops.fp8", "dtgpt.posttrain.chats")),
    (
        "dtgpt.posttrain.grpo",
        ("dtgpt.evaluation", "dtgpt.ops.fp8", "dtgpt.posttrain.chats", "dtgpt.posttrain.lora"),
    ),
    ("dtgpt.posttrain.chats", ("dtgpt.interop",)),
    ("dtgpt.interop", ("dtgpt.commands.tools", "dtgpt.posttrain.lora")),
    ("dtgpt.translate", ()),
    ("dtgpt.planning", ("dtgpt.ops.fp8", "dtgpt.posttrain.lora")),
    (
        "dtgpt.compare",
        ("dtgpt.ops.fp8", "dtgpt.planning", "dtgpt.posttrain.dpo", "dtgpt.posttrain.grpo", "dtgpt.posttrain.lora"),
    ),
    ("dtgpt.evaluation", ("dtgpt.interop", "dtgpt.posttrain.lora")),
    ("dtgpt.serve", ("dtgpt.interop", "dtgpt.posttrain.chats")),
    ("dtgpt.commands.tools", ()),
)

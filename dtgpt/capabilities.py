"""The capabilities of dtgpt: what there is beside the core. Remove a line and the folder that it names, and the core
works as before."""

# The module that describes the capability, and those of the capabilities whose modules it imports.
CAPABILITIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("dtgpt.ops.fp8", ()),
    ("dtgpt.posttrain.lora", ("dtgpt.ops.fp8",)),
    ("dtgpt.posttrain.dpo", ("dtgpt.ops.fp8",)),
    ("dtgpt.posttrain.grpo", ("dtgpt.ops.fp8", "dtgpt.posttrain.lora")),
    ("dtgpt.posttrain.chats", ()),
    ("dtgpt.interop", ()),
    ("dtgpt.translate", ()),
    ("dtgpt.planning", ()),
    ("dtgpt.compare", ()),
    ("dtgpt.evaluation", ()),
    ("dtgpt.serve", ()),
    ("dtgpt.commands.tools", ()),
)

"""Chats as data: templates of tokenizers, messages in several forms, and samples in which chats are packed."""

from dtgpt.util.seams import Capability, CommandEntry

CAPABILITY = Capability(
    commands={
        "chat": CommandEntry(
            "dtgpt.posttrain.chats.command:command",
            "dtgpt chat MODEL [--system TEXT]\n    talk to a model whose tokenizer has a chat template",
            place=70,
        ),
    },
    datasets=("dtgpt.posttrain.chats.format:CHAT_LINES", "dtgpt.posttrain.chats.format:CHAT_TOKENS"),
    encoders={"chat": "dtgpt.posttrain.chats.encode:CHATS"},
)

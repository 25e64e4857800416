"""Chats as data: templates of tokenizers, messages in several forms, and samples in which chats are packed."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(datasets=("dtgpt.posttrain.chats.format:CHAT_LINES",))

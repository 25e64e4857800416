"""Chats as data: templates of tokenizers, messages in several forms, and samples in which chats are packed."""

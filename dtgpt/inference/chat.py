"""Chats as prompts: rendered by the tokenizer's own template, up to the beginning of an answer."""

from collections.abc import Mapping
from typing import Any

from dtgpt.data.chats.encode import check_kept, encode_chat, renderer_of
from dtgpt.data.chats.messages import read_chat
from dtgpt.data.chats.template import NONE, PROBE, ChatError, Message
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.prompts import check_ids
from dtgpt.models.config import ModelConfig


class ChatPrompts:
    """Prompts of chats. `stops`: texts with which an answer ends besides the end of text. Any thread may use it. Raises
    UserError where the tokenizer has no template, or a wrong one."""

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig):
        self._tokenizer, self._config = tokenizer, config
        self._renderer = renderer_of(tokenizer)
        self.stops = self._ends()

    def encode(self, messages: list[Message], arguments: Mapping[str, Any] = NONE) -> list[int]:
        """Return the ids of a chat that an answer follows. arguments: variables of the template beside the messages.
        Raises UserError."""
        text = self._renderer.render(messages, add_generation_prompt=True, arguments=arguments).text
        check_kept(messages, text)
        return check_ids(self._tokenizer.encode_chat(text, [])[0], self._config)

    def close(self) -> None:
        """End the template's process."""
        self._renderer.close()

    def _ends(self) -> tuple[str, ...]:
        """Return the special token with which the template ends an answer, unless that is the end of text."""
        tokenizer = self._tokenizer
        try:
            found = encode_chat(read_chat({"messages": PROBE}), self._renderer, tokenizer, "assistant")
        except ChatError:
            return ()
        last = [i for i, counts in zip(found.ids, found.counts, strict=True) if counts][-1]
        name = tokenizer.decode([last])
        return (name,) if name in tokenizer.special_names and last != tokenizer.end_of_text else ()

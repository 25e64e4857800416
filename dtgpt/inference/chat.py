"""Chats as prompts: rendered by the tokenizer's own template, up to the beginning of an answer."""

from collections.abc import Sequence

from dtgpt.data.chats.encode import check_kept, encode_chat, renderer_of
from dtgpt.data.chats.template import PROBE, ChatError, Message
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.prompts import check_ids
from dtgpt.models.config import ModelConfig


class ChatPrompts:
    """Prompts of chats. `stops`: texts with which an answer ends besides the model's `ends`. Any thread may use it.
    Raises UserError where the tokenizer has no template, or a wrong one."""

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, ends: Sequence[int] = ()):
        self._tokenizer, self._config = tokenizer, config
        self._renderer = renderer_of(tokenizer)
        self.stops = self._stops(ends)

    def encode(self, messages: list[Message]) -> list[int]:
        """Return the ids of a chat that an answer follows. Raises UserError."""
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        text = self._renderer.render(plain, add_generation_prompt=True).text
        check_kept(plain, text)
        return check_ids(self._tokenizer.encode_chat(text, [])[0], self._config)

    def close(self) -> None:
        """End the template's process."""
        self._renderer.close()

    def _stops(self, ends: Sequence[int]) -> tuple[str, ...]:
        """Return the special token with which the template ends an answer, unless that is one of the `ends`."""
        tokenizer = self._tokenizer
        try:
            found = encode_chat([dict(message) for message in PROBE], self._renderer, tokenizer, "assistant")
        except ChatError:
            return ()
        last = [i for i, counts in zip(found.ids, found.counts, strict=True) if counts][-1]
        name = tokenizer.decode([last])
        return (name,) if name in tokenizer.special_names and last not in ends else ()

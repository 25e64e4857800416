"""Chats as prompts: rendered by the tokenizer's own template, up to the beginning of an answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtgpt.data.library_tokenizers.base import encode_spans
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.request import check_prompt
from dtgpt.models.config import ModelConfig
from dtgpt.posttrain.chats.encode import check_kept, encode_chat, renderer_of
from dtgpt.posttrain.chats.length import check_length
from dtgpt.posttrain.chats.messages import read_chat
from dtgpt.posttrain.chats.template import NONE, PROBE, ChatError, Message, nobody_leaves
from dtgpt.util.errors import UserError


class ChatPrompts:
    """Prompts of chats. `stops`: texts with which an answer ends besides the model's `ends`. Any thread may use it.
    Raises UserError where the tokenizer has no template, or a wrong one."""

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, ends: Sequence[int] = ()):
        self._tokenizer, self._config = tokenizer, config
        self._renderer = renderer_of(tokenizer)
        self.stops = self._stops(ends)

    def encode(
        self, messages: list[Message], arguments: Mapping[str, Any] = NONE, left: Callable[[], bool] = nobody_leaves
    ) -> list[int]:
        """Return the ids of a chat that an answer follows. arguments: variables of the template beside the messages.
        `left`: whether nobody waits for the ids any more. Raises UserError."""
        kept = (message["content"].strip() for message in messages if message["role"] != "assistant")
        check_length("\n".join(kept), self._tokenizer, self._config)
        text = self._renderer.render(messages, add_generation_prompt=True, arguments=arguments, left=left).text
        check_length(text, self._tokenizer, self._config)
        if left():
            raise UserError("nobody waits for the chat any more; ask again")
        check_kept(messages, text)
        ids = encode_spans(self._tokenizer, text, [])[0]
        check_prompt(ids, self._config.vocab_size)
        return ids

    def close(self) -> None:
        """End the template's process."""
        self._renderer.close()

    def _stops(self, ends: Sequence[int]) -> tuple[str, ...]:
        """Return the special token with which the template ends an answer, unless that is one of the `ends`."""
        tokenizer = self._tokenizer
        try:
            found = encode_chat(read_chat({"messages": PROBE}), self._renderer, tokenizer, "assistant")
        except ChatError:
            return ()
        last = [i for i, counts in zip(found.ids, found.counts, strict=True) if counts][-1]
        name = tokenizer.decode([last])
        return (name,) if name in tokenizer.special_names and last not in ends else ()

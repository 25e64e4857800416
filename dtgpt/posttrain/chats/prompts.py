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
from dtgpt.posttrain.chats.tools import TOOLS, check_tools
from dtgpt.util.errors import UserError

MARK = "dtgptgoeson"  # behind an answer that is begun, in no rendered prompt


class ChatPrompts:
    """Prompts of chats. `stops`: texts with which an answer ends besides the model's `ends`. Any thread may use it.
    Raises UserError where the tokenizer has no template, or a wrong one."""

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, ends: Sequence[int] = ()):
        self._tokenizer, self._config = tokenizer, config
        self._renderer = renderer_of(tokenizer)
        self.stops = self._stops(ends)
        self.template = self._renderer.template.source

    def encode(
        self,
        messages: list[Message],
        arguments: Mapping[str, Any] = NONE,
        left: Callable[[], bool] = nobody_leaves,
        begun: bool = False,
    ) -> list[int]:
        """Return the ids of a chat that an answer follows; with `begun`, its last message is an answer that goes on.
        arguments: variables of the template beside the messages. `left`: whether nobody waits for the ids any more.
        Raises UserError."""
        kept = (message["content"].strip() for message in messages if message["role"] != "assistant")
        check_length("\n".join(kept), self._tokenizer, self._config)
        check_tools(self.template, messages, arguments.get(TOOLS, ()))
        text = self.render(messages, arguments, left, begun)
        check_length(text, self._tokenizer, self._config)
        if left():
            raise UserError("nobody waits for the chat any more; ask again")
        ids = encode_spans(self._tokenizer, text, [])[0]
        check_prompt(ids, self._config.vocab_size)
        return ids

    def render(
        self,
        messages: list[Message],
        arguments: Mapping[str, Any] = NONE,
        left: Callable[[], bool] = nobody_leaves,
        begun: bool = False,
    ) -> str:
        """Return the text of a chat of any length, as `encode` encodes it. Raises UserError."""
        if not begun:
            text = self._renderer.render(messages, add_generation_prompt=True, arguments=arguments, left=left).text
        else:
            text = self._render_begun(messages, arguments, left)
        check_kept(messages, text)
        return text

    def _render_begun(self, messages: list[Message], arguments: Mapping[str, Any], left: Callable[[], bool]) -> str:
        """Return a chat up to the end of its last message, without what the template has behind it, which a mark finds.
        The mark ends with a blank: a template that strips it strips the blanks of the message, too."""
        if messages[-1]["role"] != "assistant" or not messages[-1]["content"].strip():
            raise ChatError("the last message is no answer that is begun; add one with the role assistant and a text")
        mark = MARK
        while any(mark in message["content"] for message in messages):
            mark += MARK
        marked = [*messages[:-1], messages[-1] | {"content": f"{messages[-1]['content']}{mark} "}]
        before, found, after = self._renderer.render(marked, arguments=arguments, left=left).text.rpartition(mark)
        if not found:
            raise ChatError("the chat template leaves out the answer that is begun; leave it out, or use another one")
        return before if after.startswith(" ") else before.rstrip()

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

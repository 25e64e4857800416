"""Blocks of chats to tokens, and to weights of these: what a worker of `dtgpt prepare --chat` does."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from dtgpt.data.chats.messages import read_chat
from dtgpt.data.chats.places import find_answers
from dtgpt.data.chats.template import ChatError, Message, Renderer, Span, TooLarge
from dtgpt.data.prepare.documents import Broken, Unreadable, json_object
from dtgpt.data.prepare.encode import Encoded, EncodedKey
from dtgpt.data.prepare.inputs import Lines, Parsed
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.util.errors import UserError, shown

KEY = "chat"  # of the files that are written: PREFIX_chat_document.bin
Loss = Literal["assistant", "all"]


class EncodedChat(NamedTuple):
    """A chat: `ids` and `counts`, whether the loss of each counts, bool `[tokens]`."""

    ids: list[int]
    counts: np.ndarray
    text: str


@dataclass(frozen=True)
class ChatEncoder:
    """`block -> Encoded`, to be pickled into workers. `loss`: of which tokens it counts."""

    vocabulary: Tokenizer
    dtype: np.dtype
    loss: Loss = "assistant"
    key: str = KEY

    @cached_property
    def _renderer(self) -> Renderer:
        return renderer_of(self.vocabulary)

    def __call__(self, block: Lines | Parsed) -> Encoded:
        encoded = Encoded(position=block.position, keys={}, broken=[], documents=0)
        chats, counts = list[EncodedChat](), list[int]()
        if isinstance(block, Parsed):
            raise TypeError("chats are lines of JSON, and not whole files")
        for found in block.parsed(self._read):
            if isinstance(found, Broken):
                encoded.broken.append(found)
            else:
                chats += found
                counts.append(len(found))
                encoded.text_bytes += sum(len(chat.text.encode()) for chat in found)
        lengths = np.array([len(chat.ids) for chat in chats], np.int32)
        tokens = np.concatenate([np.array(chat.ids) for chat in chats] or [np.empty(0)])
        weights = np.concatenate([chat.counts for chat in chats] or [np.empty(0)]).astype(np.uint8)
        encoded.keys[self.key] = EncodedKey(tokens.astype(self.dtype), lengths, np.array(counts, np.int32), weights)
        encoded.documents, encoded.text_tokens = len(counts), len(tokens)
        encoded.longest = int(lengths.max(initial=0))
        return encoded

    def _read(self, line: bytes) -> list[EncodedChat]:
        """Return the sequences of a line's document. Raises Unreadable."""
        try:
            return [encode_chat(read_chat(json_object(line)), self._renderer, self.vocabulary, self.loss)]
        except (ChatError, TooLarge) as error:
            raise Unreadable(str(error)) from None


def renderer_of(tokenizer: Tokenizer, remedy: str = "use the folder of a model that has one") -> Renderer:
    """Return what renders chats by the tokenizer's template. Raises UserError where it has none, or a wrong one.
    remedy: what a user can do where it has none."""
    if tokenizer.chat_template is None:
        raise UserError(
            f"the tokenizer {tokenizer.name} has no chat template (of tokenizer_config.json or chat_template.jinja); "
            f"{remedy}"
        )
    return Renderer(tokenizer.chat_template)


def encode_chat(messages: list[Message], renderer: Renderer, tokenizer: Tokenizer, loss: Loss) -> EncodedChat:
    """Return the tokens of a chat, and of which of them the loss counts: those of the answers, or all but the first.
    Raises ChatError for a chat that the template does not render as it is."""
    skipped = {number for number, message in enumerate(messages) if message.get("weight") == 0}
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    if loss == "all":
        text, spans = renderer.render(plain).text, list[Span]()
    else:
        text, spans = render_answers(plain, skipped, renderer, tokenizer.special_names)
    check_kept(plain, text)
    ids, counts = tokenizer.encode_chat(text, spans)
    counts = np.ones(len(ids), bool) if loss == "all" else counts
    counts[:1] = False  # which nothing predicts
    if not counts.any() and len(skipped) < sum(message["role"] == "assistant" for message in messages):
        raise ChatError("the chat template leaves out the answers; use another template")
    return EncodedChat(ids, counts, text)


def check_kept(messages: list[Message], text: str) -> None:
    """Raise ChatError where a message is not in a rendered chat: many templates leave out roles that they do not know.
    What an answer thinks may be left out."""
    for number, message in enumerate(messages):
        if message["role"] != "assistant" and message["content"].strip() not in text:
            raise ChatError(
                f"the chat template leaves out message {number}, with the role {shown(message['role'])}; use another "
                "role, or a template that knows it"
            )


def render_answers(
    messages: list[Message], skipped: set[int], renderer: Renderer, special: Collection[str]
) -> tuple[str, list[Span]]:
    """Return a chat as text, and where its answers are, with what ends them. `skipped`: numbers of messages that do not
    count. Raises ChatError."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if renderer.marks_answers:
        whole = renderer.render(messages)
        if skipped and len(whole.answers) != len(answers):
            raise ChatError("the chat template does not mark each answer, so none can have weight=0; leave it out")
        return whole.text, [
            span for place, span in enumerate(whole.answers) if not skipped or answers[place] not in skipped
        ]
    return find_answers(messages, [n for n in answers if n not in skipped], renderer.render_each, special)

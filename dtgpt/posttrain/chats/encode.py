"""Blocks of chats to tokens, and to weights of these: what a worker of `dtgpt prepare --chat` does."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from dtgpt.data.library_tokenizers.base import Span, encode_spans
from dtgpt.data.library_tokenizers.chat_template import keep_template, read_template, template_of
from dtgpt.data.prepare.config import PrepareConfig
from dtgpt.data.prepare.documents import Unreadable, json_object
from dtgpt.data.prepare.encode import Encoded, EncodedKey, MessageFormat, dtype_of
from dtgpt.data.prepare.inputs import Lines, Parsed
from dtgpt.data.text import Broken
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.posttrain.chats.fields import UsedFields, find_thoughts
from dtgpt.posttrain.chats.keys import ChatKeys, read_keys
from dtgpt.posttrain.chats.messages import Chat, read_chat, read_mark
from dtgpt.posttrain.chats.places import find_answers
from dtgpt.posttrain.chats.template import PROBE, ChatError, ChatTemplate, Message, Renderer, TooLarge
from dtgpt.posttrain.chats.tools import ROLE, TOOLS, check_tools, forms
from dtgpt.util.errors import UserError, shown

KEY = "chat"  # of the files that are written: PREFIX_chat_document.bin
Loss = Literal["assistant", "all"]
MOST_MOVED = 64  # messages that a template may write elsewhere than in their order


class EncodedChat(NamedTuple):
    """A chat: `ids` and `counts`, whether the loss of each counts, bool `[tokens]`. `thoughts`: of its answers that
    count, whether the text has what they think."""

    ids: list[int]
    counts: np.ndarray
    text: str
    thoughts: list[bool]


@dataclass(frozen=True)
class ChatEncoder:
    """`block -> Encoded`, to be pickled into workers. `loss`: of which tokens it counts. `names`: other names for the
    keys of chats. `fast`: what encodes in place of `vocabulary`, where there is something."""

    vocabulary: Tokenizer
    dtype: np.dtype
    loss: Loss = "assistant"
    names: ChatKeys = field(default_factory=ChatKeys)
    key: str = KEY
    fast: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: a worker starts its own process that renders chats."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def close(self) -> None:
        """End the process that renders chats."""
        self._renderer.close()

    @cached_property
    def _renderer(self) -> Renderer:
        return renderer_of(self.vocabulary)

    @cached_property
    def _fields(self) -> UsedFields:
        return UsedFields(self._renderer)

    def __call__(self, block: Lines | Parsed) -> Encoded:
        encoded = Encoded(position=block.position, keys={}, broken=[], documents=0)
        chats, counts = list[EncodedChat](), list[int]()
        if isinstance(block, Parsed):
            raise TypeError("chats are lines of JSON, and not whole files")
        for found in block.parsed(self._read):
            if isinstance(found, Broken):
                encoded.broken.append(found)
            elif not all(chat.counts.any() for chat in found):
                encoded.uncounted += 1
            else:
                chats += found
                counts.append(len(found))
                encoded.text_bytes += sum(len(chat.text.encode()) for chat in found)
                encoded.thoughts.update(kept for chat in found for kept in chat.thoughts)
        encoded.unused = self._fields.take_unused()
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
            fields = self.names.rename(json_object(line))
            chats = self._chats_in(fields)
            found = [encode_chat(chat, self._renderer, self.fast or self.vocabulary, self.loss) for chat in chats]
            self._fields.see(fields, chats)
            return found
        except (ChatError, TooLarge) as error:
            raise Unreadable(str(error)) from None

    def _chats_in(self, fields: dict[str, Any]) -> list[Chat]:
        return [read_chat(fields)]


def renderer_of(tokenizer: Tokenizer, remedy: str = "use the folder of a model that has one") -> Renderer:
    """Return what renders chats by the tokenizer's template. Raises UserError where it has none, or a wrong one.
    remedy: what a user can do where it has none."""
    if (template := template_of(tokenizer)) is None:
        raise UserError(
            f"the tokenizer {tokenizer.name} has no chat template (of tokenizer_config.json or chat_template.jinja); "
            f"{remedy}"
        )
    return Renderer(template)


class Chats(MessageFormat):
    """`dtgpt prepare --chat`."""

    key, kind = KEY, ChatEncoder

    def quicken(
        self, encoder: ChatEncoder, blocks: Iterator[Lines | Parsed], size: int | None
    ) -> tuple[Any, Iterator[Lines | Parsed]]:
        from dtgpt.posttrain.chats.fast import WORTHWHILE, quicken

        return (encoder, blocks) if size is not None and size < WORTHWHILE else quicken(encoder, blocks)

    def encoder(self, config: PrepareConfig, vocabulary: Tokenizer) -> ChatEncoder:
        """Return the encoder of chats. Raises UserError where the tokenizer has no template, or the template is not
        right for any chat."""
        if config.chat_template is not None:
            former = template_of(vocabulary)
            tokens = {} if former is None else former.tokens
            template = ChatTemplate(read_template(Path(config.chat_template)), tokens or named(vocabulary))
            keep_template(vocabulary, template)
        renderer = renderer_of(
            vocabulary,
            "give the folder of a model that has one as --tokenizer, or a template's file as --chat-template",
        )
        with suppress(ChatError):  # other chats may go with the template
            encode_spans(vocabulary, renderer.render(PROBE).text, [])
        encoder = self.kind(vocabulary, dtype_of(vocabulary), config.chat_loss, read_keys(config.chat_keys))
        vars(encoder)["_renderer"] = renderer  # whose process goes on with the chats, where no other one encodes them
        return encoder


CHATS = Chats()


def named(vocabulary: Tokenizer) -> dict[str, str]:
    """Return the names of a tokenizer's special tokens, as a template takes them."""
    ids = {"bos_token": vocabulary.begin_of_text, "eos_token": vocabulary.end_of_text}
    return {name: vocabulary.decode([i]) for name, i in ids.items() if i is not None}


def encode_chat(chat: Chat, renderer: Renderer, tokenizer: Tokenizer, loss: Loss) -> EncodedChat:
    """Return the tokens of a chat, and of which of them the loss counts: those of the answers after its prompt, or all
    but the first; in either case not those of answers with a mark that keeps them out. Raises ChatError for a chat that
    the template does not render as it is."""
    messages, first, arguments, _ = chat
    check_tools(renderer.template.source, messages, arguments.get(TOOLS, ()))
    answers = {number for number, message in enumerate(messages) if message["role"] == "assistant"}
    marked = {number for number in answers if read_mark(f"message {number}", messages[number]) is False}
    wanted = answers - marked - set(range(first))
    spans: list[Span] = []
    if loss == "all" and not marked:
        text = renderer.render(messages, arguments=arguments).text
    else:
        sought = marked if loss == "all" else wanted
        text, spans = render_answers(messages, answers - sought, renderer, tokenizer.special_names, arguments)
    check_kept(messages, text)
    ids, counts = encode_spans(tokenizer, text, spans)
    if loss == "all":
        counts = (~counts if marked else np.ones(len(ids), bool)) & (first < len(messages))
    counts[:1] = False  # which nothing predicts
    if not counts.any() and wanted:
        raise ChatError("the chat template leaves out the answers; use another template")
    return EncodedChat(ids, counts, text, find_thoughts(messages, wanted, arguments, renderer))


def check_kept(messages: list[Message], text: str) -> None:
    """Raise ChatError where a message is not in a rendered chat: many templates leave out roles that they do not know.
    What an answer thinks may be left out. Each message is looked for behind the one before it: to search the whole text
    for each takes time that grows with the square of a chat."""
    place = moved = 0
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            continue
        content = message["content"].strip()
        found = text.find(content, place)
        if found < 0 and message["role"] == ROLE:
            content = next((form for form in forms(content) if form in text[place:]), content)
            found = text.find(content, place)
        if found < 0:
            moved += 1
            if moved > MOST_MOVED:
                raise ChatError(
                    f"the chat template writes more than {MOST_MOVED} messages elsewhere than in their order; use "
                    "another template, or a shorter chat"
                )
            found = text.find(content)
        place = found + len(content)
        if found < 0:
            raise ChatError(
                f"the chat template leaves out message {number}, with the role {shown(message['role'])}; use another "
                "role, or a template that knows it"
            )


def render_answers(
    messages: list[Message],
    skipped: set[int],
    renderer: Renderer,
    special: Collection[str],
    arguments: Mapping[str, Any],
) -> tuple[str, list[Span]]:
    """Return a chat as text, and where its answers are, with what ends them. `skipped`: numbers of messages that do not
    count. Raises ChatError."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if renderer.marks_answers:
        whole = renderer.render(messages, arguments=arguments)
        if skipped and len(whole.answers) != len(answers):
            raise ChatError("the chat template does not mark each answer, so none can have weight=0; leave it out")
        return whole.text, [
            span for place, span in enumerate(whole.answers) if not skipped or answers[place] not in skipped
        ]
    render = partial(renderer.render_each, arguments=arguments)
    return find_answers(messages, [n for n in answers if n not in skipped], render, special)

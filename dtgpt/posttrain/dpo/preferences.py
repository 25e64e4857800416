"""Pairs of answers in several forms as pairs of chats.

TRL's: `{"prompt", "chosen", "rejected"}`, each a text or a list of messages, answers alone or whole chats; or without
the prompt, which is then what both chats have in common. OpenAI's: `{"input": {"messages"}, "preferred_output",
"non_preferred_output"}`. Texts without a prompt are read as those of Anthropic's HH-RLHF: turns that begin with
"Human:" and "Assistant:".
"""

import re
from dataclasses import dataclass
from typing import Any

from dtgpt.posttrain.chats.encode import ChatEncoder, Chats
from dtgpt.posttrain.chats.messages import FUNCTIONS, USED, Chat, read_chat, with_functions, with_system
from dtgpt.posttrain.chats.template import ChatError, Message
from dtgpt.posttrain.chats.tools import TOOLS
from dtgpt.util.errors import shown

KEY = "preference"  # of the files that are written: PREFIX_preference_document.bin
FORMS = "chosen and rejected (TRL, with or without a prompt), or OpenAI's preferred_output and non_preferred_output"
KEYS = frozenset(
    {"prompt", "chosen", "rejected", "input", "preferred_output", "non_preferred_output", *USED}
)  # of a row, that are read
TURN = re.compile(r"\n\n(Human|Assistant):")
SPEAKERS = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True)
class PairEncoder(ChatEncoder):
    """`block -> Encoded`: a document of two sequences for each pair, the chosen one first. What counts is what follows
    the prompt."""

    key: str = KEY

    def _chats_in(self, fields: dict[str, Any]) -> list[Chat]:
        return list(read_pair(fields))


class Pairs(Chats):
    """`dtgpt prepare --preferences`."""

    key, kind = KEY, PairEncoder


PAIRS = Pairs()


def read_pair(fields: dict[str, Any]) -> tuple[Chat, Chat]:
    """Return the chat with the chosen answer and that with the rejected one, which begin with the same prompt. Raises
    ChatError."""
    prompt, chosen, rejected = _parts(fields)
    prompt = with_system(fields, prompt)
    more = {name: fields.get(name) for name in USED if name != "system"}
    if isinstance(fields.get("input"), dict):
        more[TOOLS] = more[TOOLS] or fields["input"].get(TOOLS)
    pair = [read_chat(more | {"messages": [*prompt, *answer]}) for answer in (chosen, rejected)]
    for chat, name in zip(pair, ("chosen", "rejected"), strict=True):
        if not any(message["role"] == "assistant" for message in chat.messages[len(prompt) :]):
            raise ChatError(f"the {name} chat has no answer of its own; give it one, or leave the pair out")
        if chat.messages[len(prompt)]["role"] != "assistant":
            raise ChatError(
                "the chosen and the rejected chat differ before their answers; give both the same prompt, or leave the "
                "pair out"
            )
    if pair[0].messages == pair[1].messages:
        raise ChatError("the chosen and the rejected answer are the same; leave the pair out")
    one, other = (chat._replace(first=max(chat.first, len(prompt)), used=KEYS) for chat in pair)
    return one, other


def _parts(fields: dict[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return (prompt, chosen, rejected), lists of messages that are not checked yet."""
    prompt, chosen, rejected = (fields.get(name) for name in ("prompt", "chosen", "rejected"))
    if "preferred_output" in fields and isinstance(fields.get("input"), dict):
        if any(fields["input"].get(name) for name in FUNCTIONS):
            raise with_functions()
        prompt, chosen = fields["input"].get("messages"), fields["preferred_output"]
        rejected = fields.get("non_preferred_output")
    if not chosen or not rejected or type(chosen) is not type(rejected) or not isinstance(chosen, list | str):
        raise ChatError(f"there is no pair of answers under the keys {shown(list(fields)[:5])}; give {FORMS}")
    whole = isinstance(chosen, list) and _begins(chosen)
    if isinstance(prompt, str) and not whole:
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(chosen, str):
        if isinstance(prompt, list):
            return prompt, _answer(chosen), _answer(rejected)
        chosen, rejected = _turns(chosen), _turns(rejected)
    elif isinstance(prompt, list):
        if not whole:
            return prompt, chosen, rejected
        if any(messages[: len(prompt)] != prompt for messages in (chosen, rejected)):
            raise ChatError(
                "chosen and rejected are neither answers to the prompt nor chats that begin with it; give one or the "
                "other"
            )
    common = 0
    while common < min(len(chosen), len(rejected)) - 1 and chosen[common] == rejected[common]:
        common += 1
    return chosen[:common], chosen[common:], rejected[common:]


def _begins(messages: list[Any]) -> bool:
    """Return whether messages are a whole chat, and not an answer alone."""
    return isinstance(messages[0], dict) and messages[0].get("role") != "assistant"


def _answer(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


def _turns(text: str) -> list[Message]:
    before, *turns = TURN.split(text)
    if before.strip() or not turns:
        raise ChatError(
            f"{shown(text[:40])} has no prompt; give one as prompt, or turns that begin with 'Human:' and 'Assistant:'"
        )
    found = zip(turns[::2], turns[1::2], strict=True)
    return [{"role": SPEAKERS[name], "content": content.strip()} for name, content in found]

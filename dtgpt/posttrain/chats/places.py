"""Where the answers of a chat are in its text, for templates that do not mark them.

An answer begins where the template's text of the messages before it ends, and ends where the text of the messages up to
it does. To render these for each answer takes time that grows with the square of the chat's length. So a chat of many
answers is rendered twice, as it is and with short marks in place of its messages: what is between the marks is what
the template adds. Answers with the same additions around them are alike, and one of each kind is rendered with what is
before it. Where the two texts do not agree, as where a template takes parts of a message away, each answer is.
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from dtgpt.data.library_tokenizers.base import Span
from dtgpt.posttrain.chats.messages import THOUGHT_END
from dtgpt.posttrain.chats.template import SHORTEN, ChatError, Message, Rendered, TooLarge

FEW = 3  # answers, for which marks would not save a rendering
MOST_RENDERED = 1 << 26  # characters of messages before answers, which are rendered with each of these
MARK = re.compile(r"dtgptmessage(\d+)x")  # letters and digits, which filters leave as they are

Render = Callable[[Sequence[tuple[Sequence[Message], bool]]], list[Rendered]]


class Place(NamedTuple):
    """Where the content of a message is in a chat; those of one `kind` have the same text around them."""

    begin: int
    end: int
    kind: tuple


class Found(NamedTuple):
    """Where an answer is. `bare`: where the text of the messages before it ends; `prompt`: what the template adds to
    that text for an answer to begin with, None where it changes the text."""

    begin: int
    end: int
    bare: int
    prompt: str | None


def find_answers(
    messages: list[Message], sought: list[int], render: Render, special: Collection[str]
) -> tuple[str, list[Span]]:
    """Return a chat as text, and where the answers `sought`, numbers of messages, are in it, with what ends them; but
    without the blanks after one of the `special` tokens. Raises ChatError."""
    text = render([(messages, False)])[0].text
    places = _find_contents(text, messages, render) if len(sought) > FEW else {}
    spans = _find_by_kind(text, messages, sought, places, render) if places else None
    if spans is None:
        spans = [found[:2] for found in _find_each(text, messages, sought, render)]
    return text, [(begin, _without_blanks(text, begin, end, special)) for begin, end in spans]


def _find_contents(text: str, messages: list[Message], render: Render) -> dict[int, Place]:
    """Return where the contents of the messages before the last answer are, nothing where that is not certain."""
    last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
    marked = [message | {"content": f"dtgptmessage{number}x"} for number, message in enumerate(messages[:last])]
    try:
        pieces = MARK.split(render([([*marked, *messages[last:]], False)])[0].text)
    except (ChatError, TooLarge):
        return {}
    added = pieces[::2]
    if pieces[1::2] != [str(number) for number in range(last)] or not text.startswith(added[0]):
        return {}
    places, begin = dict[int, Place](), len(added[0])
    for number, message in enumerate(messages[:last]):
        content = message["content"]
        for form in (content, content.strip(), content.lstrip(), content.rstrip(), _said(content)):
            end = begin + len(form)
            if text.startswith(form, begin) and text.startswith(added[number + 1], end):
                break
        else:
            return {}
        roles = [each["role"] for each in messages[max(number - 1, 0) : number + 2]]
        places[number] = Place(begin, end, (added[number], added[number + 1], *roles))
        begin = end + len(added[number + 1])
    return places if begin == len(text) else {}


def _said(content: str) -> str:
    """Return the text of an answer behind its thought, which templates leave out of earlier answers."""
    return content.rpartition(THOUGHT_END)[2].strip()


def _find_by_kind(
    text: str, messages: list[Message], sought: list[int], places: dict[int, Place], render: Render
) -> list[Span] | None:
    """Return where answers are, from one answer of each kind; None where the text around that one is another."""
    kinds = {number: places[number].kind if number in places else (number,) for number in sought}
    firsts = {kind: number for number, kind in reversed(kinds.items())}
    numbers = list(firsts.values())
    found = dict(zip(numbers, _find_each(text, messages, numbers, render), strict=True))
    spans = []
    for number, kind in kinds.items():
        begin, end, bare, prompt = found[firsts[kind]]
        if number != firsts[kind]:
            first, place = places[firsts[kind]], places[number]
            if prompt is None or bare > first.begin or end < first.end:
                return None
            begin = place.begin - first.begin + bare
            begin += len(prompt) if text.startswith(prompt, begin) else 0
            end += place.end - first.end
        spans.append((begin, end))
    return spans


def _find_each(text: str, messages: list[Message], numbers: list[int], render: Render) -> list[Found]:
    """Return where answers are, each from the text of the messages before it. Raises ChatError."""
    wanted: list[tuple[list[Message], bool]] = []
    for number in numbers:
        wanted += [(messages[:number], True), (messages[:number], False), (messages[: number + 1], False)]
    if sum(len(message["content"]) for chat, _ in wanted for message in chat) > MOST_RENDERED:
        raise TooLarge(
            f"the chat template changes messages by their place, so that {len(numbers)} answers are not found in a "
            f"chat of this length; {SHORTEN}"
        )
    parts = [part.text for part in render(wanted)]
    found = []
    for place, number in enumerate(numbers):
        prompted, bare, answered = parts[3 * place : 3 * place + 3]
        # The beginning of an answer that a template gives is left out only where it gives it to all answers.
        before = prompted if text.startswith(prompted) else bare
        begin, end = _answer(text, before, answered, messages[number]["content"].strip(), number)
        prompt = prompted[len(bare) :] if prompted.startswith(bare) and text.startswith(bare) else None
        found.append(Found(begin, end, len(bare), prompt))
    return found


def _answer(text: str, before: str, answered: str, content: str, number: int) -> Span:
    """Return where an answer is in a chat, from what the template makes of the messages before it and up to it."""
    begin = len(before)
    if text.startswith(before):
        if text.startswith(answered) and len(answered) > begin:
            return begin, len(answered)
        # The last answer of a chat may look otherwise, as with a thought before it: its end is that of its content.
        for form in dict.fromkeys((content, _said(content))):
            closing = answered[answered.rfind(form) + len(form) :]
            found = text.find(form, begin)
            if form and found >= 0 and form in answered and text.startswith(closing, found + len(form)):
                return begin, found + len(form) + len(closing)
    raise ChatError(
        f"the chat template changes message {number} when others follow, so that it is not known which tokens are the "
        "answer's; use a template with generation blocks, or --chat-loss all"
    )


def _without_blanks(text: str, begin: int, end: int, special: Collection[str]) -> int:
    """Return the end of an answer without the blanks after the special token that ends it."""
    stripped = text[begin:end].rstrip()
    return begin + len(stripped) if stripped.endswith(tuple(special)) else end

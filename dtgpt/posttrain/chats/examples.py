"""Chats that a small model learns within a minute: questions about days, months, opposites, sounds, capitals and sums.

Each question has several phrasings. The last chats ask for facts in phrasings which no other chat has for them, so that
their loss falls only where a model connects phrasings of a question.
"""

import json
import random
from pathlib import Path

from dtgpt.data.megatron.paths import idx_path
from dtgpt.data.prepare.config import PrepareConfig
from dtgpt.data.prepare.job import prepare
from dtgpt.posttrain.chats.template import ChatTemplate
from dtgpt.util.storage import write_text

CHATS, HELD_OUT = 2000, 100  # chats, and how many of them, the last, have held-out questions
TEMPLATE = ChatTemplate(
    "{% for message in messages %}### {{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant\n{% endif %}",
    {"eos_token": "<|endoftext|>"},
)
DAYS = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"
MONTHS = "January, February, March, April, May, June, July, August, September, October, November, December"
OPPOSITES = "hot cold, big small, old new, day night, left right, up down, open closed, fast slow, full empty"
SOUNDS = "cow moo, cat meow, dog woof, duck quack, sheep baa, pig oink, bee buzz, owl hoot, lion roar, snake hiss"
CAPITALS = "France Paris, Italy Rome, Spain Madrid, Japan Tokyo, Egypt Cairo, Greece Athens, Peru Lima, Cuba Havana"
SUMS = [(f"{a} plus {b}", str(a + b)) for a in range(1, 6) for b in range(1, 6)]


def _pairs(words: str) -> list[tuple[str, str]]:
    return [(first, second) for first, second in (pair.split() for pair in words.split(", "))]


def _cycle(words: str) -> list[tuple[str, str]]:
    names = words.split(", ")
    return list(zip(names, [*names[1:], names[0]], strict=True))


KINDS = (  # phrasings of a question, its answer, and pairs to put into both
    (
        ("What day comes after {}?", "Which day follows {}?", "Tell me the day after {}."),
        "{1} comes after {0}.",
        _cycle(DAYS),
    ),
    (
        ("What month comes after {}?", "Which month follows {}?", "Tell me the month after {}."),
        "{1} comes after {0}.",
        _cycle(MONTHS),
    ),
    (
        ("What is the opposite of {}?", "Which word is the opposite of {}?", "Tell me the opposite of {}."),
        "The opposite of {0} is {1}.",
        _pairs(OPPOSITES),
    ),
    (
        ("What does a {} say?", "Which sound does a {} make?", "Tell me the sound of a {}."),
        "The {0} says {1}.",
        _pairs(SOUNDS),
    ),
    (
        ("What is the capital of {}?", "Which city is the capital of {}?", "Tell me the capital of {}."),
        "The capital of {0} is {1}.",
        _pairs(CAPITALS),
    ),
    (("What is {}?", "How much is {}?", "Tell me the sum of {}."), "{0} is {1}.", SUMS),
)


def example_chats(seed: int = 1) -> list[list[dict[str, str]]]:
    """Return the chats, of one or two questions each."""
    draw = random.Random(seed)
    asked = [
        (phrase.format(pair[0]), answer.format(*pair))
        for phrases, answer, pairs in KINDS
        for pair in pairs
        for phrase in phrases
    ]
    draw.shuffle(asked)
    held_out, known = asked[: len(asked) // 10], asked[len(asked) // 10 :]
    chats = []
    for number in range(CHATS):
        chosen = draw.sample(known if number < CHATS - HELD_OUT else held_out, draw.randint(1, 2))
        turns = [({"role": "user", "content": q}, {"role": "assistant", "content": a}) for q, a in chosen]
        chats.append([message for turn in turns for message in turn])
    return chats


def prepare_examples(prefix: Path, tokenizer: Path) -> None:
    """Write the chats as `PREFIX.jsonl`, their template, and token files `PREFIX_chat_document` of a tokenizer; nothing
    where these are there already."""
    if idx_path(f"{prefix}_chat_document").exists():
        return
    prefix.parent.mkdir(parents=True, exist_ok=True)
    chats, template = prefix.with_suffix(".jsonl"), prefix.with_suffix(".jinja")
    write_text(chats, "".join(json.dumps({"messages": chat}) + "\n" for chat in example_chats()))
    write_text(template, TEMPLATE.source)
    prepare(
        PrepareConfig(
            input=(str(chats),),
            chat=True,
            chat_template=str(template),
            output_prefix=str(prefix),
            tokenizer=str(tokenizer),
        )
    )

"""Answers in the text of a long chat: a few renderings find them where one for each answer does."""

import json
import random

import pytest

from dtgpt.data.prepare.config import PrepareConfig
from dtgpt.data.prepare.job import prepare
from dtgpt.posttrain.chats import places
from dtgpt.posttrain.chats.places import find_answers
from dtgpt.posttrain.chats.template import ChatTemplate, Renderer, TooLarge
from tests.support.chats import FAMILIES, conversation, text, write_tokenizer

pytest.importorskip("jinja2")
pytestmark = pytest.mark.slow(2)

PLAIN = {name: source for name, (source, _, _) in FAMILIES.items() if name != "chatml"}
PLAIN |= {
    "chatml": FAMILIES["chatml"][0].replace("{% generation %}", "").replace("{% endgeneration %}", ""),
    # begins each answer that is to come with a thought, which an answer may or may not have
    "thinks": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
}
# In the manner of Qwen3: the thoughts of answers before the last question are left out.
PLAIN["strips"] = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{%- set said = m.content.split('</think>')[-1].lstrip('\n') %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '' %}
{%- if m.role != 'assistant' %}{%- set said = m.content %}
{%- elif loop.index0 > ns.last %}{%- set said = '<think>\n' + thought + '\n</think>\n\n' + said %}{%- endif %}
{{- '<|im_start|>' + m.role + '\n' + said + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
NUMBERED = "{% for m in messages %}{{ loop.index }} {{ m.content }}\n{% endfor %}"
SPECIAL = ("<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>")


def turns(count, length=0):
    return [
        {"role": role, "content": f"{role[0]}{number} " + "ö" * length}
        for number in range(count)
        for role in ("user", "assistant")
    ]


@pytest.mark.parametrize("family", PLAIN)
def test_answers_are_where_rendering_each_of_them_finds_them(family, monkeypatch):
    renderer = Renderer(ChatTemplate(PLAIN[family], {"bos_token": "<s>", "eos_token": "</s>"}))
    draw = random.Random(family)
    for number in range(3):
        messages = [each for _ in range(3) for each in conversation(draw, system=False)]
        for message in messages[1::2]:
            message["content"] = draw.choice(["<think>\nwhy</think>", "", "<|im_end|>"]) + text(draw)
        if number == 2 and family not in ("mistral", "gemma"):
            messages = [{"role": "system", "content": "be brief"}, *messages]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        monkeypatch.setattr(places, "FEW", 99)
        expected = find_answers(messages, answers, renderer.render_each, SPECIAL)
        monkeypatch.setattr(places, "FEW", 0)
        assert find_answers(messages, answers, renderer.render_each, SPECIAL) == expected
        assert find_answers(messages, answers[1::2], renderer.render_each, SPECIAL)[1] == expected[1][1::2]
    renderer.close()


@pytest.mark.parametrize("turns", [1, 2, 9])
def test_thoughts_that_are_left_out_are_not_trained_and_the_last_one_is(turns):
    renderer = Renderer(ChatTemplate(PLAIN["strips"], {}))
    messages = []
    for number in range(turns):
        thought = f"<think>\nwhy {number}\n</think>\n\n"
        messages += [
            {"role": "user", "content": f"{number}?"},
            {"role": "assistant", "content": f"{thought}so {number}"},
        ]
    whole, spans = find_answers(messages, list(range(1, 2 * turns, 2)), renderer.render_each, SPECIAL)
    wanted = [f"so {number}<|im_end|>" for number in range(turns)]
    wanted[-1] = thought + wanted[-1]
    assert [whole[begin:end] for begin, end in spans] == wanted
    renderer.close()


@pytest.mark.parametrize("family", ["qwen3", "thinks"])
def test_renderings_do_not_grow_with_the_number_of_answers(family):
    renderer, rendered = Renderer(ChatTemplate(PLAIN[family], {"bos_token": "<s>", "eos_token": "</s>"})), []

    def render(chats):
        rendered.extend(len(messages) for messages, _ in chats)
        return renderer.render_each(chats)

    messages = turns(200, 2000)
    whole, spans = find_answers(messages, list(range(1, 400, 2)), render, ())
    assert all(f"a{n} " in whole[begin:end] and end - begin < 2100 for n, (begin, end) in enumerate(spans))
    assert sum(rendered) < 8 * 400  # 120,000 if each answer's beginning is rendered
    renderer.close()


def test_a_chat_that_would_take_too_long_is_left_out_and_named(tmp_path, monkeypatch):
    folder = write_tokenizer(tmp_path / "model", template=NUMBERED)
    chats = [turns(2), turns(9, 200), turns(1)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in chats))
    config = PrepareConfig(
        input=tmp_path / "a.jsonl", chat=True, output_prefix=tmp_path / "x", tokenizer=str(folder), workers=1,
        broken=str(tmp_path / "broken"),
    )  # fmt: skip
    assert prepare(config).documents == 3
    monkeypatch.setattr(places, "MOST_RENDERED", 40_000)
    summary = prepare(PrepareConfig(**{**vars(config), "output_prefix": str(tmp_path / "y"), "overwrite": True}))
    assert (summary.documents, summary.broken) == (2, 1)
    told = json.loads((tmp_path / "broken").read_text())
    assert told["line"] == 2 and "9 answers are not found in a chat of this length; shorten" in told["reason"]


def test_a_template_that_takes_too_long_for_one_chat_leaves_it_out(tmp_path):
    source = "{% if messages | length > 2 %}{{ 'a'.ljust(4000000000) }}{% endif %}" + NUMBERED
    folder = write_tokenizer(tmp_path / "model", template=source)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": turns(n)}) + "\n" for n in (1, 2, 1)))
    config = {"chat": True, "output_prefix": tmp_path / "x", "tokenizer": str(folder), "workers": 1}
    summary = prepare(PrepareConfig(input=tmp_path / "a.jsonl", **config))
    assert (summary.documents, summary.broken) == (2, 1)
    with pytest.raises(TooLarge, match="takes too much memory; shorten the chat, or use another template"):
        write_tokenizer(tmp_path / "model", template="{{ 'a'.ljust(4000000000) }}")
        prepare(PrepareConfig(input=tmp_path / "a.jsonl", **config | {"output_prefix": tmp_path / "y"}))

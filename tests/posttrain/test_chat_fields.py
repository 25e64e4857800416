"""All that a row has reaches the chat template, as in transformers, or is told or refused; marks keep answers out."""

import json
import re

import numpy as np
import pytest

from dtgpt.data.megatron.indexed import IndexedDataset
from dtgpt.data.prepare.config import PrepareConfig
from dtgpt.data.prepare.job import prepare
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.posttrain.chats.encode import encode_chat, renderer_of
from dtgpt.posttrain.chats.messages import MARKS, read_chat, read_messages
from dtgpt.posttrain.chats.prompts import ChatPrompts
from dtgpt.posttrain.chats.template import ChatTemplate, Renderer
from dtgpt.util.errors import UserError
from tests.support.chats import CHATML, HERMES, write_tokenizer
from tests.support.server import client, served, tiny_model

pytest.importorskip("jinja2")
pytestmark = pytest.mark.slow(6)

# In the manner of Qwen3: thoughts after the last question alone, and none at all where `enable_thinking` is false.
REASONS = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- if date is defined %}{{- '<|im_start|>system\\nToday is ' + date + '<|im_end|>' }}{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + (' ' + m.name if m.name is defined else '') + '\\n' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.last and m.reasoning_content is string %}
        {{- '<think>\\n' + m.reasoning_content.strip() + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
# In the manner of GPT-OSS: a thought is a message of its own, told by a key that is there.
CHANNELS = """{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if "thinking" in m %}{{- '<|im_start|>analysis\\n' + m.thinking + '<|im_end|>' }}{%- endif %}
        {{- '<|im_start|>final\\n' }}{%- generation %}{{- m.content + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>' }}{%- endif %}"""
WHOLE = "{% for m in messages %}{{ m | tojson }}<|im_end|>{% endfor %}"  # a template that writes all fields as they are


def user(content="Why?", **more):
    return {"role": "user", "content": content, **more}


def answer(content="Because.", **more):
    return {"role": "assistant", "content": content, **more}


ROWS = [
    {"messages": [user(), answer(reasoning_content="Let me see.")]},
    {"messages": [user(), answer(reasoning_content="One."), user("And?"), answer("So.", reasoning_content="Two.")]},
    {"messages": [user(name="Ada"), answer(thinking="Hm.", reasoning_content="Hm, hm.")], "chat_template_kwargs": {
        "enable_thinking": False, "date": "Monday"}},
    {"messages": [user(extra={"a": [1, None, 0.5]}), answer(thinking="")], "chat_template_kwargs": {"eos_token": "x"}},
]  # fmt: skip


def run(path, rows, template=REASONS, **options):
    """Prepare rows and return (summary, texts of chats with what counts in brackets)."""
    folder = write_tokenizer(path / "model", template=template)
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = "preference" if options.get("preferences") else "chat"
    given = {"chat": kind == "chat", "tokenizer": str(folder), "workers": 1, "overwrite": True, **options}
    summary = prepare(PrepareConfig(input=path / "rows.jsonl", output_prefix=path / "x", **given))
    tokenizer, dataset = open_tokenizer(str(folder)), IndexedDataset(path / f"x_{kind}_document")
    texts = []
    for number, length in enumerate(dataset.lengths.tolist()):
        counts = dataset.read_weights(np.array([number]), np.array([length])) > 0
        cuts = np.flatnonzero(np.diff(counts)) + 1
        pieces = [tokenizer.decode(ids.tolist()) for ids in np.split(dataset.window(number), cuts)]
        texts.append("".join(f"[{piece}]" if i % 2 else piece for i, piece in enumerate(pieces)))
    return summary, texts


@pytest.mark.parametrize("template", [REASONS, CHANNELS, WHOLE], ids=["reasons", "channels", "whole"])
def test_a_template_gets_messages_and_variables_as_in_transformers(template, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.24")  # 5.17 knew one name of a thought
    write_tokenizer(tmp_path, template=template)
    theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path), open_tokenizer(str(tmp_path))
    renderer, prompts = renderer_of(ours), ChatPrompts(ours, tiny_model(vocab_size=320).config)
    for row in ROWS:
        more = row.get("chat_template_kwargs", {})
        expected = theirs.apply_chat_template(row["messages"], tokenize=False, **more)
        assert encode_chat(read_chat(row), renderer, ours, "assistant").text == expected
        asked = row["messages"][:-1]
        expected = theirs.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, **more)
        assert prompts.encode(read_messages(asked), more) == expected["input_ids"]
    renderer.close()
    prompts.close()


def test_thoughts_names_and_variables_are_trained_on(tmp_path, capsys):
    summary, texts = run(tmp_path, ROWS[:3])
    start = "<|im_start|>user\nWhy?<|im_end|><|im_start|>assistant\n"
    assert texts[0] == start + "[<think>\nLet me see.\n</think>\n\nBecause.<|im_end|>]"
    assert (
        texts[1].startswith(start + "[Because.<|im_end|>]") and "[<think>\nTwo.\n</think>\n\nSo.<|im_end|>]" in texts[1]
    )
    assert texts[2].startswith("<|im_start|>system\nToday is Monday<|im_end|><|im_start|>user Ada\nWhy?<|im_end|>")
    assert summary.thoughts == {True: 3, False: 1}
    assert "in 1 of 4 answers the template leaves out the thought" in capsys.readouterr().err


def test_pairs_reach_the_template_whole(tmp_path):
    row = {"prompt": [user(name="Ada")], "chosen": [answer("Yes", reasoning_content="Hm")], "rejected": [answer("No")],
           "chat_template_kwargs": {"date": "Monday"}, "score": 3}  # fmt: skip
    summary, texts = run(tmp_path, [row], preferences=True)
    begin = "<|im_start|>system\nToday is Monday<|im_end|><|im_start|>user Ada\nWhy?<|im_end|><|im_start|>assistant\n"
    assert texts == [f"{begin}[<think>\nHm\n</think>\n\nYes<|im_end|>]", f"{begin}[No<|im_end|>]"]
    assert summary.unused == {"score of rows"}


def test_what_nothing_used_is_told_once(tmp_path, capsys):
    row = {"messages": [user(id=7), answer(name="Ada")], "source": "web", "url": None, "system": "Be brief",
           "chat_template_kwargs": {"enable_thinking": True}}  # fmt: skip
    run(tmp_path, [row] * 5, CHATML)
    told = capsys.readouterr().out
    named = "enable_thinking of chat_template_kwargs, id of messages, name of messages, source of rows"
    assert told.count("nothing used") == 1 and f"nothing used these keys: {named}\n" in told
    run(tmp_path, [row], WHOLE)
    assert (
        "nothing used these keys: enable_thinking of chat_template_kwargs, source of rows\n" in capsys.readouterr().out
    )


@pytest.mark.parametrize("thought", [{"reasoning_content": "4, since 2 and 2 are 4"}, {"thinking": "Why?"},
                                     {"content": "<think>\n4, I say\n</think>\n\n4"}])  # fmt: skip
def test_thoughts_that_a_template_strips_are_counted(thought, tmp_path, capsys):
    """Also where their words are those of the question or of the answer; and where they are tagged in the content."""
    strips = "{% for m in messages %}<|im_start|>{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
    rows = [{"messages": [user(), answer("4") | thought]}] * 30
    run(tmp_path, rows, strips, chat_loss="all")
    assert "in 30 of 30 answers the template leaves out the thought" in capsys.readouterr().err
    summary, _ = run(tmp_path, rows, WHOLE, chat_loss="all")
    assert summary.thoughts == {True: 30}


@pytest.mark.parametrize(
    ("name", "loss"), [*((name, "assistant") for name in MARKS), ("weight", "all"), ("masked", "all")]
)
def test_marks_of_every_name_keep_an_answer_out(name, loss, tmp_path):
    out, kept = not MARKS[name], MARKS[name]
    rows = [{"messages": [user(**{name: out}), answer("First", **{name: int(out)}), user(), answer("Last")]},
            {"messages": [user(), answer("First", **{name: kept}), user(), answer("Last", **{name: float(out)})]},
            {"messages": [user(), answer("First", **{name: None}), user(), answer("Last")], name: out},
            {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "First", name: out},
                               {"from": "gpt", "value": "Last"}]}]  # fmt: skip
    summary, texts = run(tmp_path, rows, CHATML, chat_loss=loss)
    assert (summary.documents, summary.uncounted, summary.broken) == (3, 1, 0)
    for text, counted, out in zip(texts, ("Last", "First", "Last"), ("First", "Last", "First"), strict=True):
        piece = next(piece for piece in text.replace("]", "[").split("[")[1::2] if counted in piece)
        assert piece.endswith(f"{counted}<|im_end|>") or loss == "all"
        assert not any(out in piece for piece in text.replace("]", "[").split("[")[1::2])


WRONG = [
    ([user(), answer(train="no")], {}, "message 1 has train='no', a mark of whether its loss counts; use 0 or 1"),
    ([user(), answer(loss=0.3)], {}, "message 1 has loss=0.3, .*; use 0 or 1"),
    ([user(), answer(train=True, weight=0)], {}, "message 1 has weight=0 and train=True, of which one keeps it out"),
    ([user(), answer(training_detail=[{"train": False}])], {}, "message 1 has training_detail=.*, a mark that is not"),
    ([user(), answer(mask=0)], {}, "message 1 has mask=0, a mark that is not read; leave it out, or"),
    ([user(), answer()], {"system": ["Be brief"]}, r"the chat has system=\['Be brief'\], which is not a text; give it"),
    ([user(), answer()], {"ignore": True}, "the chat has ignore=True, a mark that is not read"),
    ([user(train=True), answer()], {}, "message 0 has train=True, which only answers have"),
    ([user(), answer()], {"loss_mask": [0, 1]}, r"the chat has loss_mask=\[0, 1\], .*; use 0 or 1"),
    ([user(), answer()], {"chat_template_kwargs": "x"}, "chat_template_kwargs='x' is not an object"),
    ([user(), answer()], {"chat_template_kwargs": {"tools": [{}]}}, "chat_template_kwargs has tools, which is no var"),
    ([user(), answer()], {"chat_template_kwargs": {"add_generation_prompt": True}}, "has add_generation_prompt"),
]  # fmt: skip


def test_what_is_neither_read_nor_rendered_is_told(tmp_path):
    rows = [{"messages": messages, **row} for messages, row, _ in WRONG]
    summary, texts = run(tmp_path, [*rows, ROWS[0]], CHATML, broken=str(tmp_path / "broken"))
    assert (len(texts), summary.broken) == (1, len(WRONG))
    told = map(json.loads, (tmp_path / "broken").read_text().splitlines())
    for found, (_, _, wrong) in zip(told, WRONG, strict=True):
        assert re.search(wrong, found["reason"]), found
    with pytest.raises(UserError, match="holds no chat in which anything counts"):
        run(tmp_path / "none", [{"messages": [user(), answer(weight=0)]}], CHATML)
    assert not list((tmp_path / "none").glob("x*"))


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'


def test_calls_are_trained_on_and_tools_and_results_are_not(tmp_path, capsys):
    """As rows have them, as JSON in a table, and of several results before an answer."""
    turns = [user("Add"), {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    results = [{"role": "tool", "tool_call_id": "1", "content": "3 < 4"}] * 2
    rows = [{"messages": [*turns, *results, answer("Three")], "tools": TOOLS}]
    rows.append(rows[0] | {"tools": json.dumps(TOOLS)})
    summary, texts = run(tmp_path, rows, HERMES)
    assert summary.documents == 2 and texts[0] == texts[1]
    assert f"[\n{CALLED}]" in texts[0] and "[Three<|im_end|>]" in texts[0] and texts[0].count("[") == 2
    assert '"parameters": {"type": "object"}' in texts[0] and texts[0].count("<tool_response>\n3 < 4\n") == 2
    assert "tool_call_id" not in capsys.readouterr().err


def test_tools_of_openais_pairs_reach_the_template(tmp_path):
    calls = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    row = {"input": {"messages": [user()], "tools": TOOLS}, "preferred_output": [calls],
           "non_preferred_output": [answer("b")]}  # fmt: skip
    _, texts = run(tmp_path, [row], HERMES, preferences=True)
    assert all('"name": "add"' in text for text in texts) and CALLED in texts[0] and "b<|im_end|>" in texts[1]


def test_pairs_with_an_answer_that_does_not_count_are_left_out(tmp_path):
    pair = {"prompt": "Why?", "chosen": [answer("Yes")], "rejected": [answer("No")]}
    summary, texts = run(tmp_path, [pair, pair | {"rejected": [answer("No", train=False)]}], preferences=True)
    assert (summary.documents, summary.uncounted, len(texts)) == (1, 1, 2)
    assert "1 in which nothing counts left out" in str(summary)


def test_the_process_that_checks_a_template_renders_the_chats(tmp_path, monkeypatch):
    started, start = [], Renderer._start
    monkeypatch.setattr(Renderer, "_start", lambda renderer: started.append(renderer) or start(renderer))
    run(tmp_path, [{"messages": [user(), answer()]}], CHATML)
    (renderer,) = started
    assert renderer.template.source == CHATML and renderer._process is not None


def test_null_is_absent_as_in_a_column_of_a_table(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [{"messages": [user(), answer("Yes", thinking="Hm")], "chat_template_kwargs": {"date": "Monday"}},
            {"messages": [user(), answer("No")], "chat_template_kwargs": None}]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    folder = write_tokenizer(tmp_path / "model", template=CHANNELS)
    given = {"input": tmp_path / "rows.parquet", "tokenizer": str(folder), "workers": 1, "chat": True}
    summary = prepare(PrepareConfig(output_prefix=tmp_path / "x", **given))
    dataset, tokenizer = IndexedDataset(tmp_path / "x_chat_document"), open_tokenizer(str(folder))
    assert summary.broken == 0 and summary.unused == {"date of chat_template_kwargs"}
    assert "analysis\nHm" in tokenizer.decode(dataset.window(0).tolist())
    assert "analysis" not in tokenizer.decode(dataset.window(1).tolist())


def test_the_server_hands_the_template_what_a_client_sends(tmp_path):
    from dtgpt.serve.app import make_app

    tokenizer = open_tokenizer(str(write_tokenizer(tmp_path, template=REASONS)))
    model, renderer = tiny_model(seq_length=256, vocab_size=320), Renderer(ChatTemplate(REASONS, {}))
    messages, more = [user(name="Ada", weight=3)], {"enable_thinking": False, "date": "Monday"}
    text = renderer.render(messages, add_generation_prompt=True, arguments=more).text
    assert "Today is Monday" in text and "user Ada" in text and text.endswith("</think>\n\n")
    renderer.close()
    with served(model, tokenizer) as service:
        app = client(make_app(service))
        asked = {"messages": messages, "max_tokens": 1, "chat_template_kwargs": more}
        answered = app.post("/v1/chat/completions", json=asked)
        assert answered.json()["usage"]["prompt_tokens"] == len(tokenizer.encode_spans(text, [])[0])
        wrong = app.post("/v1/chat/completions", json=asked | {"chat_template_kwargs": {"tools": []}})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "chat_template_kwargs"

"""Chats as data: rendering equal to transformers', masks, packing, hostile templates, broken chats, a run."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from dtgpt.data.megatron.indexed import IndexedDataset
from dtgpt.data.prepare.config import PrepareConfig
from dtgpt.data.prepare.job import prepare
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.posttrain.chats.encode import check_kept, encode_chat, renderer_of
from dtgpt.posttrain.chats.messages import read_chat
from dtgpt.posttrain.chats.packed import BEGINS, COUNTS, chat_beginning, pack, packed_batch
from dtgpt.posttrain.chats.template import PROBE, ChatError, ChatTemplate, Renderer, template_of
from dtgpt.train.loop import train
from dtgpt.train.setup import open_trainer, read_dataset
from dtgpt.train.texts.generate import generate_text
from dtgpt.util.errors import UserError
from tests.support.chats import CHATML, FAMILIES, conversation, write_tokenizer
from tests.support.ranks import pool, several
from tests.support.runs import change, losses, newest_run, training

pytest.importorskip("jinja2")
pytestmark = pytest.mark.slow(14)

QUESTION = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": " world"}


def write_chats(path, chats):
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("chatml"))


@pytest.fixture
def prepared(folder, tmp_path):
    draw = random.Random(3)
    chats = write_chats(tmp_path / "chats.jsonl", [{"messages": conversation(draw)} for _ in range(120)])
    prepare(PrepareConfig(input=chats, chat=True, output_prefix=tmp_path / "mine", tokenizer=str(folder), workers=1))
    return str(tmp_path / "mine_chat_document")


@pytest.mark.parametrize("family", FAMILIES)
def test_chats_have_the_ids_and_masks_of_transformers(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, family)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = open_tokenizer(str(tmp_path))
    renderer, draw = renderer_of(ours), random.Random(family)
    for _ in range(12):
        messages = conversation(draw, system=family != "gemma")
        for prompt in (False, True):
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert renderer.render(messages, prompt).text == expected
        found = encode_chat(read_chat({"messages": messages}), renderer, ours, "assistant")
        marked = family == "chatml"
        expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=marked)
        assert found.ids == expected["input_ids"]
        answers = [m["content"].strip() for m in messages if m["role"] == "assistant"]
        if marked:
            assert found.counts.astype(int).tolist() == expected["assistant_masks"]
        counted = theirs.decode([i for i, counts in zip(found.ids, found.counts, strict=True) if counts])
        assert all(answer in counted for answer in answers)
        questions = [m["content"].strip() for m in messages if m["role"] != "assistant" and len(m["content"]) > 8]
        assert not any(question in counted for question in questions)
    renderer.close()


def test_rendered_prefixes_find_what_generation_blocks_mark(folder):
    tokenizer, draw = open_tokenizer(str(folder)), random.Random(5)
    plain = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    renderers = [Renderer(ChatTemplate(source, {})) for source in (CHATML, plain)]
    for _ in range(12):
        messages = conversation(draw)
        messages[-1] |= {"weight": draw.choice([0, 1])}
        chat = read_chat({"messages": messages})
        marked, found = (encode_chat(chat, renderer, tokenizer, "assistant") for renderer in renderers)
        assert found.counts.tolist() == marked.counts.tolist()
        everything = encode_chat(chat, renderers[0], tokenizer, "all").counts
        kept_out = tokenizer.decode([i for i, counts in zip(found.ids, everything, strict=True) if not counts])
        answer = "" if messages[-1]["weight"] else f"{messages[-1]['content']}<|im_end|>"
        assert kept_out == f"<|im_start|>{answer}"  # and the first token, which nothing predicts
    for renderer in renderers:
        renderer.close()


@pytest.mark.parametrize(("source", "wrong"), [
    ("{% for i in range(10**9) %}x{% endfor %}", "a power"),
    ("{% for i in range(1000000000) %}x{% endfor %}", "too far"),
    ("{{ 'a' * 1000000000 }}", "too long"), ("{{ [0] * 1000000000 }}", "too long"), ("{{ '%999999999d' % 1 }}", "long"),
    ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "too long"),
    ("{{ 'a'.ljust(4000000000) }}", "memory"),
    ("{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
     "memory"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "may not"), ("{{ messages.append(1) }}", "may not"),
    ("{{ cycler.__init__.__globals__.os.system('true') }}", "may not"), ("{% if %}", "not valid Jinja"),
    ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "memory"), ("{{ '\\ud800' }}", "fails for the chat"),
    ("{% set a %}{% generation %}Hi{% endgeneration %}{% endset %}text {{ a }}", "not written where it stands"),
    ("{% include 'secret' %}", "fails for the chat"), ("{% for m in messages %}{{ m.content }}", "not valid Jinja"),
])  # fmt: skip
def test_hostile_templates_are_refused(source, wrong):
    with pytest.raises(UserError, match=wrong):
        Renderer(ChatTemplate(source, {})).render([QUESTION, ANSWER])


def test_a_template_without_an_end_is_ended(monkeypatch, tmp_path):
    """The process sets its own alarm, and nothing that it calls can put that off."""
    from dtgpt.posttrain.chats import template

    quick = tmp_path / "sandbox.py"
    quick.write_text(template.SANDBOX.read_text().replace("SECONDS = 10 ", "SECONDS = 1 "))
    monkeypatch.setattr(template, "SANDBOX", quick)
    loop = "{% for i in range(99999) %}" * 4 + "{% set x = 1 %}" + "{% endfor %}" * 4
    renderer = Renderer(ChatTemplate("{% if messages | length > 1 %}" + loop + "{% endif %}fine", {}))
    with pytest.raises(UserError, match="too much time or memory"):
        renderer.render([QUESTION, ANSWER])
    assert renderer.render([QUESTION]).text == "fine"  # by another process
    renderer.close()


BROKEN = [
    ({"messages": [QUESTION, {"role": "assistant", "content": " "}]}, "message 1 is an empty answer"),
    ({"messages": [QUESTION]}, "no answer of the assistant"), ({"messages": []}, "not a list of messages"),
    ({"messages": [QUESTION, {"role": "tool", "content": "1"}, ANSWER]}, "leaves out message 1, with the role 'tool'"),
    ({"messages": [QUESTION, ANSWER], "tools": [{}]}, "tool 0 is {}, which is no function with a name"),
    ({"messages": [QUESTION, ANSWER], "tools": [{"name": "f"}]}, "the chat template writes no tools; leave them out"),
    ({"messages": [QUESTION, {**ANSWER, "tool_calls": [{"function": {"name": "f"}}]}]}, "writes no tool_calls"),
    ({"messages": [{**QUESTION, "tool_calls": [{"function": {"name": "f"}}]}, ANSWER]}, "which only answers have"),
    ({"messages": [QUESTION, {**ANSWER, "tool_calls": [{"name": "f"}]}]}, "message 1 has the call .*, of no function"),
    ({"messages": [QUESTION, {**ANSWER, "tool_calls": {}, "function_call": {"name": "f"}}]}, "an older form of tools"),
    ({"messages": [QUESTION, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
     r"message 1 calls with arguments=\[1\]; give an object"),
    ({"messages": [QUESTION, ANSWER], "tools": "["}, "is not JSON; give a list"),
    ({"messages": [QUESTION, {"role": "boss", "content": "1"}, ANSWER]}, "message 1 has the role 'boss'"),
    ({"messages": [{"role": "developer", "content": "left out"}, QUESTION, ANSWER]}, "leaves out message 0"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, "parts that are not text"),
    ({"messages": [QUESTION, ANSWER | {"weight": 2}]}, "weight=2"), ({"text": "Hello"}, "no chat under the keys"),
    ({"conversations": [{"from": "alien", "value": "x"}]}, "from 'alien'"),
    ({"messages": [{"role": "system", "content": "a"}, QUESTION, ANSWER], "system": "b"}, "role system and system='b'"),
    ({"messages": [QUESTION, QUESTION, ANSWER]}, "refuses the chat .*alternate"),
    ({"messages": ["Hello", ANSWER]}, "message 0 is 'Hello'; give an object with a role and a content"),
    ({"messages": [{"role": "user", "content": 3}, ANSWER]}, "message 0 has the content 3; give it a text"),
    ({"conversations": [{"from": "observation", "value": "x"}]}, "no answer of the assistant"),
    ({"conversations": [{"from": "function_call", "value": "x"}]}, "an older form of tools"),
    ({"conversations": "Hello"}, "not a list of messages"), ({"conversations": [QUESTION]}, "no answer of the assist"),
]  # fmt: skip


def test_broken_chats_are_left_out_each_with_a_sentence(tmp_path):
    template = (
        "{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('must alternate') }}{% endif %}"
        "{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}"
    )
    folder = write_tokenizer(tmp_path / "model", template=template)
    given = {"chat": True, "output_prefix": tmp_path / "x", "tokenizer": str(folder), "workers": 1}
    chats = [chat for chat, _ in BROKEN]
    path = write_chats(tmp_path / "chats.jsonl", [*chats, {"messages": [QUESTION, ANSWER]}])
    summary = prepare(PrepareConfig(input=path, broken=str(tmp_path / "broken"), **given))
    assert (summary.documents, summary.broken) == (1, len(BROKEN))
    told = [json.loads(line) for line in (tmp_path / "broken").read_text().splitlines()]
    for number, (found, (_, wrong)) in enumerate(zip(told, BROKEN, strict=True), 1):
        assert found["line"] == number and re.search(wrong, found["reason"]), found
    path = write_chats(tmp_path / "none.jsonl", chats[:1])
    with pytest.raises(UserError, match="message 1 is an empty answer"):
        prepare(PrepareConfig(input=path, **given | {"output_prefix": tmp_path / "y"}))
    assert not list(tmp_path.glob("y*"))


def test_options_that_do_not_go_with_chats_are_refused(folder, tmp_path):
    path = write_chats(tmp_path / "chats.jsonl", [{"messages": [QUESTION, ANSWER]}])
    given = {"input": path, "chat": True, "output_prefix": tmp_path / "x", "workers": 1}
    with pytest.raises(UserError, match="bytes has no chat template"):
        prepare(PrepareConfig(**given, tokenizer="bytes"))
    with pytest.raises(UserError, match="--append-eod cannot be combined with --chat"):
        prepare(PrepareConfig(**given, tokenizer=str(folder), append_eod=True))
    with pytest.raises(UserError, match="--chat-loss needs --chat"):
        prepare(PrepareConfig(**given | {"chat": False}, chat_loss="all"))


def test_every_form_gives_the_same_chat(folder, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    messages = {"messages": [QUESTION, ANSWER]}
    shares = {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": " world"}]}
    pair = {"prompt": "Hello", "completion": " world"}
    parts = {"messages": [QUESTION | {"content": [{"type": "text", "text": "Hello"}]}, ANSWER]}
    lines = write_chats(tmp_path / "chats.jsonl", [messages, shares, pair, parts])
    parquet.write_table(pyarrow.Table.from_pylist([messages]), tmp_path / "more.parquet")
    inputs = [lines, str(tmp_path / "more.parquet")]
    summary = prepare(
        PrepareConfig(input=inputs, chat=True, output_prefix=tmp_path / "x", tokenizer=str(folder), workers=2)
    )
    assert summary.documents == 5 and not summary.broken
    dataset = IndexedDataset(tmp_path / "x_chat_document")
    assert len({dataset.window(i).tobytes() for i in range(5)}) == 1
    weights = np.asarray(dataset.weights).reshape(5, -1)
    answer = open_tokenizer(str(folder)).decode(dataset.window(0)[weights[0] > 0])
    assert (weights == weights[0]).all() and answer == " world<|im_end|>"


def test_a_null_of_a_row_is_a_field_that_the_row_does_not_have(folder, tmp_path):
    """A table gives each row the fields of all, in messages, too. Of parquet: test_chat_fields.py."""
    fields = dict.fromkeys(("messages", "conversations", "prompt", "completion", "system", "tools"))
    of_message = dict.fromkeys(("weight", "tool_calls", "name"))
    rows = [
        {"messages": [QUESTION | of_message, ANSWER | of_message | {"weight": 1}]},
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": " world", "weight": None}]},
        {"prompt": "Hello", "completion": " world"},
    ]
    rows = [fields | row for row in rows]
    given = {"input": write_chats(tmp_path / "chats.jsonl", rows), "output_prefix": tmp_path / "x", "workers": 1}
    summary = prepare(PrepareConfig(**given, chat=True, tokenizer=str(folder)))
    assert summary.documents == 3 and not summary.broken
    dataset = IndexedDataset(tmp_path / "x_chat_document")
    assert len({dataset.window(i).tobytes() for i in range(3)}) == 1


@pytest.mark.parametrize("form", [
    {"messages": [QUESTION, ANSWER], "system": "Be brief"}, {"messages": [QUESTION, ANSWER], "system": ""},
    {"messages": [{"role": "system", "content": "Be brief"}, QUESTION, ANSWER], "system": "Be brief"},
    {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": " world"}], "system": "Be brief"},
])  # fmt: skip
def test_an_instruction_apart_from_the_messages_is_the_first(form):
    instruction = [{"role": "system", "content": "Be brief"}] if form["system"] else []
    assert read_chat(form).messages == [*instruction, QUESTION, ANSWER]


@pytest.mark.parametrize("row, asked, answers", [
    ({"instruction": "Add", "input": "1 2", "output": "3"}, ["Add\n1 2"], ["3"]),
    ({"instruction": "Add", "input": "", "output": "3"}, ["Add"], ["3"]),
    ({"instruction": "", "input": "1 2", "output": "3"}, ["1 2"], ["3"]),
    ({"instruction": "more", "output": "4", "history": [["Add", "3"]]}, ["Add", "more"], ["3", "4"]),
])  # fmt: skip
def test_an_instruction_and_its_input_are_one_message(row, asked, answers):
    chat = read_chat(row | {"system": "Be brief"})
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * len(asked)]
    contents = [message["content"] for message in chat.messages[1:]]
    assert (contents[::2], contents[1::2]) == (asked, answers)
    assert {*row, "system"} <= chat.used


@pytest.mark.parametrize("row, reason", [
    ({"instruction": 0, "output": "a"}, r"input are \[0\], which are not texts"),
    ({"instruction": "a", "input": {}, "output": "a"}, "which are not texts"),
    ({"instruction": "a", "output": " "}, "is an empty answer"),
    ({"instruction": "a", "output": 1}, "has the content 1; give it a text"),
    ({"instruction": "a", "output": "b", "history": [["c"]]}, "is not a list of pairs of texts"),
    ({"instruction": "a"}, "instruction and output .Alpaca., or name others by --chat-keys"),
])  # fmt: skip
def test_an_instruction_that_is_none_is_told(row, reason):
    with pytest.raises(ChatError, match=reason):
        read_chat(row)


def test_keys_and_roles_of_other_names_give_the_same_chat(folder, tmp_path):
    turns = [{"who": "customer", "said": "Hello"}, {"who": "agent", "said": " world", "weight": 1}]
    keys = ("messages=dialog", "role=who", "content=said", "user=customer", "assistant=agent", "output=reply")
    rows = [
        {"dialog": turns, "messages": "of something else"},
        {"messages": [QUESTION, ANSWER]},
        {"instruction": "Hello", "reply": " world", "output": "hidden"},
        {"conversations": [{"from": "customer", "value": "Hello"}, {"from": "agent", "value": " world"}]},
    ]
    path = write_chats(tmp_path / "chats.jsonl", rows)
    given = {"input": path, "tokenizer": str(folder), "output_prefix": tmp_path / "x", "workers": 2}
    summary = prepare(PrepareConfig(**given, chat=True, chat_keys=keys))
    assert (summary.documents, summary.broken, summary.unused) == (4, 0, set())
    dataset = IndexedDataset(tmp_path / "x_chat_document")
    assert len({dataset.window(i).tobytes() for i in range(4)}) == 1
    pair = {"q": "Hello", "chosen": [turns[1]], "rejected": [{"who": "agent", "said": "no"}]}
    given |= {"input": write_chats(tmp_path / "pairs.jsonl", [pair]), "workers": 1}
    summary = prepare(PrepareConfig(**given, preferences=True, chat_keys=("prompt=q", *keys[1:5])))
    assert (summary.documents, summary.sequences, summary.broken) == (1, 2, 0)


@pytest.mark.parametrize("keys, reason", [
    (("dialog",), "'dialog' is not NAME=KEY"), (("speaker=x",), "'speaker=x' is not NAME=KEY with the name"),
    (("role=",), "is not NAME=KEY"), (("role=a", "role=b"), "gives role or 'b' twice"),
    (("role=a", "content=a"), "gives content or 'a' twice"),
])  # fmt: skip
def test_names_of_keys_that_are_none_are_refused_before_anything_is_read(folder, tmp_path, keys, reason):
    with pytest.raises(UserError, match=reason):
        prepare(PrepareConfig(
            input="/dev/null", output_prefix=tmp_path / "x", tokenizer=str(folder), chat=True, chat_keys=keys
        ))  # fmt: skip
    assert not any(tmp_path.iterdir())


def test_answers_in_a_prompt_do_not_count(folder, tmp_path):
    first, second = {"role": "assistant", "content": "First"}, {"role": "assistant", "content": "Second"}
    chats = [
        {"prompt": [QUESTION, first, QUESTION], "completion": [second]},
        {"prompt": [first], "completion": [QUESTION]},
    ]
    given = {"input": write_chats(tmp_path / "chats.jsonl", chats), "output_prefix": tmp_path / "x", "workers": 1}
    summary = prepare(PrepareConfig(**given, chat=True, tokenizer=str(folder)))
    dataset = IndexedDataset(tmp_path / "x_chat_document")
    assert (summary.documents, summary.broken) == (1, 1)
    counted = dataset.window(0)[np.asarray(dataset.weights) > 0]
    assert open_tokenizer(str(folder)).decode(counted) == "Second<|im_end|>"


def test_that_messages_are_kept_is_seen_in_linear_time():
    first = {"role": "user", "content": "x" * 480_000}
    chat = [first] + [{"role": "user", "content": f"{number:x}"} for number in range(5000, 17_500)]
    text = "".join(f"<{message['content']}>\n" for message in chat)
    begin = time.process_time()
    check_kept(chat, text)
    assert time.process_time() - begin < 1  # 4 s where each message is looked for in the whole text
    with pytest.raises(ChatError, match="leaves out message 12500"):
        check_kept(chat, text[:-3])
    moved = [{"role": role, "content": f"{role} {number}"} for number in range(40) for role in ("user", "system")]
    text = " ".join(message["content"] for message in sorted(moved, key=lambda message: message["role"]))
    check_kept(moved, text)
    with pytest.raises(ChatError, match="more than 64 messages elsewhere"):
        check_kept([{"role": "user", "content": str(number)} for number in range(999, 100, -1)],
                   " ".join(map(str, range(1000))))  # fmt: skip


@pytest.mark.parametrize("left, size", [(False, 10), (True, 10), (False, 2_000_000)])  # more than any pipe holds
def test_a_template_whose_process_is_suspended_or_killed_is_started_again(folder, monkeypatch, left, size):
    renderer = renderer_of(open_tokenizer(str(folder)))
    whole = renderer.render(PROBE).text
    os.kill(renderer._process.pid, signal.SIGKILL)
    renderer._process.wait()
    assert renderer.render(PROBE).text == whole
    monkeypatch.setattr("dtgpt.posttrain.chats.template.SILENT", 30.0 if left and size < 99 else 0.3)
    os.kill(renderer._process.pid, signal.SIGSTOP)
    with pytest.raises(UserError, match="was ended"):
        renderer.render([{"role": "user", "content": "x" * size}], left=lambda: left)
    monkeypatch.undo()
    assert renderer.render(PROBE).text == whole


def test_a_renderer_that_nobody_closes_ends_in_silence_with_python(folder):
    source = (
        "from dtgpt.posttrain.chats.encode import renderer_of; from dtgpt.data.tokenizers.open import open_tokenizer\n"
        f"kept = renderer_of(open_tokenizer({str(folder)!r}))\n"
        "kept.itself = kept  # which Python collects when its modules have gone\n"
        "print(kept._process.pid)"
    )
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert found.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(found.stdout), 0)


@pytest.mark.parametrize("loss", ["assistant", "all"])
def test_the_beginning_of_a_chat_is_all_before_its_last_answer(folder, tmp_path, loss, monkeypatch):
    messages = [QUESTION, ANSWER, QUESTION, ANSWER | {"content": "last"}]
    path = write_chats(tmp_path / "chats.jsonl", [{"messages": messages}])
    given = {"input": path, "output_prefix": tmp_path / "x", "workers": 1}
    prepare(PrepareConfig(**given, chat=True, tokenizer=str(folder), chat_loss=loss))
    dataset, tokenizer = IndexedDataset(tmp_path / "x_chat_document"), open_tokenizer(str(folder))
    ids, ends = chat_beginning(dataset, 0)
    if loss == "all":
        assert (tokenizer.decode(ids), ends) == ("<|im_start|>", ())
        return
    assert tokenizer.decode(ids).endswith("world<|im_end|><|im_start|>user\nHello<|im_end|><|im_start|>assistant\n")
    assert tokenizer.decode(ends) == "<|im_end|>"
    monkeypatch.setattr(dataset, "read_weights", lambda chats, lengths: np.zeros(int(lengths.sum()), np.uint8))
    assert chat_beginning(dataset, 0) is None


def test_chats_are_used_although_the_longest_lose_their_answers(folder, tmp_path, chat_recipe):
    """Those of which no token counts are left out."""
    long = {"messages": [{"role": "user", "content": "a" * 90}, ANSWER]}
    path = write_chats(tmp_path / "chats.jsonl", [long] * 300 + [{"messages": [QUESTION, ANSWER]}] * 3)
    given = {"input": path, "output_prefix": tmp_path / "x", "workers": 1}
    prepare(PrepareConfig(**given, chat=True, tokenizer=str(folder)))
    recipe = change(chat_recipe, data={"path": str(tmp_path / "x_chat_document"), "split": "1,0,0"})
    dataset = read_dataset(recipe)
    assert (len(dataset.train.chats), dataset.train.uncounted) == (3, 300) and dataset.bytes_per_token() > 0
    assert len(dataset.beginnings(3, 64)) == 3
    with pytest.raises(
        UserError, match=r"no token of .* counts in samples of 64 tokens: the answers are cut off, or have"
    ):
        read_dataset(change(recipe, data={"split": "300,3,0"}))


def test_packing_leaves_little_room_and_puts_every_chat_somewhere():
    lengths = np.random.RandomState(0).lognormal(5.5, 0.8, 3000).astype(np.int64).clip(8, 2049)
    samples = pack(lengths, 2049, seed=1)
    assert sorted(chat for sample in samples for chat in sample) == list(range(3000))
    used = [int(lengths[sample].sum()) for sample in samples]
    assert max(used) <= 2049 and sum(used) >= 0.98 * 2049 * len(samples)
    assert samples == pack(lengths, 2049, seed=1) != pack(lengths, 2049, seed=2**40)


@pytest.fixture
def chat_recipe(recipe, prepared):
    """A run of samples of 64 tokens, in which some chats are cut."""
    return change(
        recipe, model={"seq_length": 64, "vocab_size": 384},
        data={"path": prepared, "split": "80,20,0", "tokenizer": "auto"},
        log={"sample_tokens": 0}, steps=4,
    )  # fmt: skip


def test_samples_keep_chats_apart_and_count_answers(chat_recipe, prepared, capsys):
    dataset, chats = read_dataset(chat_recipe), IndexedDataset(prepared)
    assert "chats cut after 65 tokens" in capsys.readouterr().err
    count = len(dataset.train)
    ids, key = torch.arange(2 * count), torch.zeros(2)
    windows = dataset.windows(ids, 64, key)
    first, second = (sorted(map(str, part.tolist())) for part in (windows[:count], windows[count:]))
    assert first == second and not torch.equal(windows[:count], windows[count:])  # each once an epoch, in another order
    known = {tuple(chats.window(i)[:65].tolist()): i for i in range(96)}
    seen = 0
    for window in windows[:count]:
        begins = [*torch.nonzero(window[:, 1] & BEGINS)[:, 0].tolist(), 65]
        batch = packed_batch(window[None])
        assert torch.equal(batch.loss_weights[0] > 0, (window[1:, 1] & COUNTS) > 0)
        for begin, end in pairwise(begins):
            piece = window[begin:end, 0].tolist()
            if begin == begins[-2] and tuple(piece) not in known:
                assert not (window[begin:, 1] & COUNTS).any()  # filling
                continue
            seen += 1
            i = known[tuple(piece)]
            weights = chats.read_weights(np.array([i]), np.array([len(piece)]))
            assert (window[begin:end, 1] & COUNTS).tolist() == weights.tolist()
            last = min(end, 64)
            assert batch.positions[0, begin:last].tolist() == list(range(last - begin))
            assert batch.document_bounds[0, begin:last].tolist() == [[begin, last]] * (last - begin)
    assert seen + dataset.train.uncounted == 96


def test_every_plan_and_micro_batch_size_has_the_losses_of_one_process(chat_recipe):
    chat_recipe = change(chat_recipe, steps=2, plan="single")
    train(chat_recipe)
    whole = losses(newest_run(chat_recipe))
    parted = [
        replace(chat_recipe, plan=plan, micro_batch_size=size, runs=f"{chat_recipe.runs}-{plan}")
        for plan, size in (("dp2", 1), ("tp2", 4), ("cp2", 2))
    ]
    assert pool().run(2, several, [(train, own) for own in parted]) == [[0, 0, 0]] * 2
    for own in parted:
        assert losses(newest_run(own)) == pytest.approx(whole, rel=1e-6)
    saved = open_tokenizer(str(newest_run(chat_recipe) / "tokenizer.json"))
    assert template_of(saved).source == CHATML


def test_inspect_shows_what_is_masked(prepared, capsys):
    from dtgpt.interop.inspect_command import InspectOptions, inspect

    inspect(InspectOptions(input=(prepared,), show=True, samples=1))
    shown = capsys.readouterr().out
    assert "<|im_start|>assistant\n]a" in shown and "<|im_end|>" in shown.rpartition("]")[2]


def test_samples_of_a_run_are_held_out_chats_with_the_models_answers(chat_recipe, prepared):
    log = {"sample_tokens": 6, "sample_interval": 2, "temperature": 0}
    wanted = change(chat_recipe, log=log, steps=4, plan="single")
    train(wanted)
    samples = newest_run(wanted) / "samples"
    assert len(list(samples.iterdir())) == 2
    written = (samples / "step_00000004.txt").read_text()
    chats, tokenizer = IndexedDataset(prepared), open_tokenizer(str(newest_run(wanted) / "tokenizer.json"))
    with open_trainer(wanted, newest_run(wanted)) as trainer:
        beginnings = trainer.dataset.beginnings(3, 64)
        held_out = {tuple(chats.window(i)[: len(b.ids)].tolist()) for b in beginnings for i in range(96, 120)}
        assert len(beginnings) == 3 and all(tuple(b.ids) in held_out for b in beginnings)
        model, texts = trainer.stages[0], []
        for ids, ends in beginnings:
            ids, end = list(ids), len(ids) + 6
            assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n") and tokenizer.decode(ends) == "<|im_end|>"
            while len(ids) < min(64, end) and (len(ids) == end - 6 or ids[-1] not in ends):
                ids.append(int(model(torch.tensor([ids]))[0, -1, : tokenizer.vocab_size].argmax()))
            texts.append(tokenizer.decode(ids))
    assert written.rstrip("\n") == "\n\n".join(texts).rstrip("\n")
    parted = change(wanted, plan="tp2", runs=f"{wanted.runs}-tp2")
    assert pool().run(2, train, parted) == [0, 0]
    assert (newest_run(parted) / "samples" / "step_00000004.txt").read_text() == written
    assert "7 and" in generate_text(training(change(wanted, log={"prompt": "7 and"})))

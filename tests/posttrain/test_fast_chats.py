"""Chats are encoded by fastokens to the ids and weights of the library that defines them, or by that library."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from dtgpt.data.library_tokenizers.libraries import TokenizerJson
from dtgpt.data.prepare import PrepareConfig, prepare
from dtgpt.data.prepare.fast import fast_for
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.posttrain.chats import fast
from dtgpt.posttrain.chats.fast import FastSpans
from tests.data.prepare.test_fast import hostile
from tests.support.vocabularies import cut_by_pattern

pytest.importorskip("fastokens")
pytest.importorskip("jinja2")
pytestmark = pytest.mark.slow(6)
NAMES = {"llama3": ("<|begin_of_text|>", "<|eot_id|>"), "qwen3": ("<|im_start|>", "<|im_end|>")}
TEMPLATE = "{%% for m in messages %%}{{ '%s' + m.role + '\n' + m.content + '%s' }}{%% endfor %%}"


@pytest.fixture(params=["llama3", "qwen3"])
def tokenizer(request, tmp_path) -> TokenizerJson:
    """Cut as that family cuts texts; Llama 3's library leaves blanks at the edges of a token out."""
    path, names = cut_by_pattern(tmp_path, request.param), NAMES[request.param]
    if request.param == "llama3":
        saved = json.loads(path.read_text())
        saved["post_processor"]["processors"][0]["trim_offsets"] = True
        path.write_text(json.dumps(saved))
    settings = {"eos_token": names[1], "chat_template": TEMPLATE % names}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = open_tokenizer(str(tmp_path))
    assert isinstance(found, TokenizerJson)
    return found


def test_ids_and_weights_of_hostile_texts_are_those_of_the_defining_library(tokenizer):
    made = fast_for(tokenizer, [], special=True)
    assert made is not None
    quick, rng, alone = FastSpans(tokenizer, made), random.Random(0), 0
    for _ in range(1500):
        text = hostile(rng, list(tokenizer.special_names)) + rng.choice(("", " ", "\n "))
        cuts = sorted(rng.sample(range(len(text) + 1), min(4, len(text) + 1)))
        spans = list(zip(cuts[::2], cuts[1::2], strict=False))
        ids, weights = tokenizer.encode_spans(text, spans)
        found, counts = quick.encode_spans(text, spans)
        assert found == ids and np.array_equal(counts, weights), (text, spans)
        alone += quick._encode(text, spans) is not None
    assert alone > 300  # without the defining library


@pytest.fixture
def chats(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(fast, "WORTHWHILE", 1000)
    monkeypatch.setattr(fast, "COMPARED", 1000)
    rng, lines = random.Random(1), []
    for _ in range(300):
        turns = [(role, hostile(rng, []).strip() or "x") for role in ("user", "assistant") * 2]
        lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "chats.jsonl"


def prepared(chats: Path, tokenizer: TokenizerJson, name: str) -> tuple[bool, list[bytes]]:
    folder = Path(tokenizer.name).parent
    options = {"tokenizer": str(folder), "chat": True, "workers": 1}
    summary = prepare(PrepareConfig(input=chats, output_prefix=chats.with_name(name), **options))
    assert summary.documents > 250
    return summary.fast, [path.read_bytes() for path in sorted(chats.parent.glob(f"{name}_chat_document.*"))]


def test_files_are_the_same_without_it_and_where_it_gives_a_chat_other_tokens(tokenizer, chats, monkeypatch, capsys):
    quick = prepared(chats, tokenizer, "quick")
    with monkeypatch.context() as patched:
        patched.setattr(fast, "is_installed", lambda: False)
        plain = prepared(chats, tokenizer, "plain")
    assert (quick[0], plain[0]) == (True, False) and quick[1] == plain[1] and len(quick[1]) >= 4
    assert "fastokens gives" not in capsys.readouterr().err
    encode = FastSpans._encode

    def wrong(self, text, spans):
        found = encode(self, text, spans)
        return found and (found[0], ~found[1])  # ids are right, and weights are not

    monkeypatch.setattr(FastSpans, "_encode", wrong)
    is_fast, files = prepared(chats, tokenizer, "wrong")
    assert not is_fast and files == plain[1]
    assert "fastokens gives other tokens to a chat; tokenizers, which is slower" in capsys.readouterr().err


def test_few_chats_are_left_to_the_defining_library(tokenizer, chats, monkeypatch):
    monkeypatch.setattr(fast, "WORTHWHILE", 1 << 24)
    assert prepared(chats, tokenizer, "few")[0] is False
    monkeypatch.setattr(fast, "WORTHWHILE", 0)
    monkeypatch.setattr(fast, "COMPARED", 1 << 24)
    assert prepared(chats, tokenizer, "fewer")[0] is False

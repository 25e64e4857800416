"""Texts are encoded by fastokens to the ids of the library that defines them, or by that library."""

import json
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from dtgpt.data.library_tokenizers.files import open_path
from dtgpt.data.prepare import documents, encode, fast, job
from dtgpt.data.prepare.documents import Unreadable, json_document
from dtgpt.data.prepare.job import SHARE, most_workers
from dtgpt.data.prepare.pool import ordered_map
from dtgpt.data.text import BLOCK
from dtgpt.data.tokenizers.open import open_tokenizer
from tests.support.prepared import run
from tests.support.vocabularies import cut_by_pattern, gpt2_files, normalized, rank_file, tokenizer_json

pytestmark = pytest.mark.slow(6)

ALPHABET = (
    *"aAmMsStTlL'' \t\n\r.-_0129<|>",
    *"\u00e9\u0301\u0323\u017f\u212a\u0130\u0661\u2167\u00bd\u4e00\uac01\u11a8\u0e01\u0e33\u200d\ufe0f\u00a0\u2028\x85",
    *"\U00010348\U0001f388\U00020000\U00030000\U000e0041\U000f0000\U0010fffd",
)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return gpt2_files(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(tokenizer_json(tmp_path_factory.mktemp("small")))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(encode, "COMPARED", 400)


def hostile(rng, names):
    parts = rng.choices([*ALPHABET, *names], k=rng.randrange(1, 60))
    return "".join(part * rng.choice((1, 1, 1, 2, 9)) for part in parts)


def files(summary):
    return [path.read_bytes() for path in sorted(summary.files[0].parent.glob(summary.files[0].name + ".*"))]


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen3", "composed", "ranks"])
def test_ids_of_hostile_texts_are_those_of_the_library_that_defines_them(tmp_path, gpt2, kind):
    pytest.importorskip("fastokens")
    if kind == "gpt2":
        vocabulary = open_tokenizer("gpt2", *map(str, gpt2))
    elif kind == "ranks":
        rank_file(tmp_path / "qwen.tiktoken")
        vocabulary = open_path(tmp_path / "qwen.tiktoken", False)
    else:
        path = normalized(tokenizer_json(tmp_path, bos=True)) if kind == "composed" else cut_by_pattern(tmp_path, kind)
        vocabulary = open_path(path, False)
    rng = random.Random(0)
    names = [*vocabulary.special_names][:4]
    texts = [hostile(rng, names) for _ in range(1500)]
    for special in (False, True):
        quick = fast.fast_for(vocabulary, [], special)
        assert quick is not None
        found = quick.encode_batch(texts, special)
        for text, own, theirs in zip(texts, vocabulary.encode_batch(texts, special), found, strict=True):
            assert own.tolist() == theirs.tolist(), repr(text)


@pytest.mark.parametrize("workers", [1, 2])
def test_files_are_the_same_with_and_without_fastokens(tmp_path, monkeypatch, tokenizer, workers):
    pytest.importorskip("fastokens")
    rng = random.Random(1)
    documents = [
        {"text": [hostile(rng, ["<|endoftext|>"]), ""], "title": f"title {i}" if i % 3 else ""} for i in range(300)
    ]
    options = {"tokenizer": tokenizer, "append_eod": True, "workers": workers}
    options |= {"json_keys": ("text", "title"), "encode_special": workers == 2}
    monkeypatch.setattr("dtgpt.data.prepare.documents.BLOCK", 5000)
    quick, _ = run(tmp_path, documents, **options)
    assert quick.fast and str(quick).endswith("by fastokens")
    written = files(quick)
    monkeypatch.setattr(encode, "is_installed", lambda: False)
    plain, _ = run(tmp_path, documents, **options)
    assert not plain.fast and "fastokens" not in str(plain)
    assert files(plain) == written and len(written) == 3
    assert {**vars(plain), "seconds": 0, "fast": True} == {**vars(quick), "seconds": 0}


def test_a_short_input_does_not_start_a_second_library(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(encode, "is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "fastokens", None)  # whose import is then an error
    summary, _ = run(tmp_path, [{"text": "a" * 399}], tokenizer=tokenizer)
    assert not summary.fast and summary.documents == 1


class Stand:
    """In place of fastokens' tokenizer: one that encodes as the other library does, but for what `wrong` says."""

    vocabulary = wrong = None

    @classmethod
    def from_json_str(cls, content):
        if cls.vocabulary is None:
            raise ValueError("unsupported model: WordPiece\nand more")
        return cls()

    def encode_batch_flat(self, texts, add_special_tokens, split_special_tokens):
        assert add_special_tokens
        ids = [self.wrong(t, i) for t, i in zip(texts, self.vocabulary.encode_batch(texts), strict=True)]
        bounds = np.cumsum([0, *map(len, ids)]).astype(np.uint64)
        return np.concatenate(ids).astype(np.uint32).tobytes(), bounds.tobytes()


def prepared_by(stand, tmp_path, monkeypatch, tokenizer, texts):
    """What is written where fastokens is `stand`, and what is written without."""
    monkeypatch.setitem(sys.modules, "fastokens", SimpleNamespace(Tokenizer=stand))
    monkeypatch.setattr(encode, "is_installed", lambda: True)
    summary, _ = run(tmp_path, [{"text": text} for text in texts], tokenizer=tokenizer)
    written = files(summary)
    monkeypatch.setattr(encode, "is_installed", lambda: False)
    plain, _ = run(tmp_path, [{"text": text} for text in texts], tokenizer=tokenizer)
    return summary, written, files(plain)


def test_other_ids_are_told_once_and_nothing_of_them_is_written(tmp_path, monkeypatch, tokenizer, capsys):
    class Other(Stand):
        vocabulary = open_tokenizer(tokenizer)
        wrong = staticmethod(lambda text, ids: ids[:-1] if "odd" in text else ids)

    texts = ["plain " * 20, "an odd one", "an odd one", *["x" * 50] * 20]
    summary, written, plain = prepared_by(Other, tmp_path, monkeypatch, tokenizer, texts)
    told = capsys.readouterr().err
    assert written == plain and not summary.fast
    assert told.count("fastokens gives other ids than") == 1 and "'an odd one'; tiktoken, which is slower" in told


def test_the_probes_find_what_the_beginning_of_the_input_does_not_have(tmp_path, monkeypatch, tokenizer, capsys):
    class Other(Stand):
        vocabulary = open_tokenizer(tokenizer)
        wrong = staticmethod(lambda text, ids: ids[::-1] if any(f"{c}'m" in text for c in fast.WIDE) else ids)

    summary, written, plain = prepared_by(Other, tmp_path, monkeypatch, tokenizer, ["a plain text " * 50])
    assert written == plain and not summary.fast and "gives other ids" in capsys.readouterr().err


def test_a_tokenizer_that_fastokens_does_not_know_is_encoded_by_its_library(tmp_path, monkeypatch, tokenizer, capsys):
    summary, written, plain = prepared_by(Stand, tmp_path, monkeypatch, tokenizer, ["a plain text " * 50])
    assert written == plain and not summary.fast
    assert "tokenizer.json (unsupported model: WordPiece); tiktoken, which is slower" in capsys.readouterr().err


def test_a_text_that_fastokens_fails_on_is_encoded_by_the_other_library(tmp_path, monkeypatch, tokenizer):
    def fail(text, ids):
        if "late" in text:
            raise RuntimeError("match limit")
        return ids

    class Fails(Stand):
        vocabulary = open_tokenizer(tokenizer)
        wrong = staticmethod(fail)

    summary, written, plain = prepared_by(Fails, tmp_path, monkeypatch, tokenizer, ["early " * 99, "a late text", "b"])
    assert written == plain and summary.fast


def test_the_package_is_recommended_for_large_inputs_alone(tmp_path, monkeypatch, tokenizer, capsys):
    monkeypatch.setattr(encode, "is_installed", lambda: False)
    for large, times in ((1, 1), (1 << 20, 0)):
        monkeypatch.setattr(encode, "LARGE", large)
        run(tmp_path, [{"text": "a"}], tokenizer=tokenizer)
        assert capsys.readouterr().out.count("pip install 'dtgpt[fast]' brings fastokens") == times


def test_as_many_workers_start_as_have_enough_to_do(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(8), raising=False)
    sizes = None, 0, 1 << 26, 1 << 27, 1 << 29, 1 << 40
    assert [most_workers(size, SHARE) for size in sizes] == [8, 1, 1, 2, 5, 8]
    assert [most_workers(size, BLOCK) for size in (None, 0, BLOCK - 1, BLOCK, 1 << 26)] == [8, 1, 1, 2, 8]


@pytest.mark.parametrize("size, started", [(1 << 10, 1), (3 << 20, 4)])
def test_a_small_input_is_encoded_without_other_processes(tmp_path, monkeypatch, size, started):
    """By the library that defines the ids, where nobody asks for a number."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(8), raising=False)
    asked = []
    monkeypatch.setattr(job, "ordered_map", lambda encoder, workers: asked.append(workers) or ordered_map(encoder, 1))
    run(tmp_path, [{"text": "a" * size}], workers=0)
    assert asked == [started]


LINES = (
    '{"text": "a"}', '{"text": ["a", "\\u00e9\\n"], "n": 1.5}', '{"text": "\\ud83d\\ude00"}', '{"text": "\\ud800x"}',
    '{"text": "a", "n": NaN}', '{"text": "a", "n": 1e999}', f'{{"text": "a", "n": {"1" * 400}}}', '{"text": "\u2028"}',
    '{"text": "a", "text": "b"}', '{"text": null}', '{"text": 1}', "[1]", "1", "{", '{"text": "a"} x', '{"text": "\t"}',
    f'{{"text": "a", "n": {"1" * 5000}}}', f'{{"text": "a", "n": {"[" * 1100}{"]" * 1100}}}', "{}",
    '\ufeff{"text": ""}',
)  # fmt: skip


@pytest.mark.parametrize("line", [*map(str.encode, LINES), b'{"text": "\xff"}', b'{"text": "\xed\xa0\x80"}'])
def test_a_line_is_the_same_document_or_broken_for_the_same_reason_with_and_without_orjson(monkeypatch, line):
    pytest.importorskip("orjson")

    def read():
        try:
            return json_document(line, ("text",))
        except Unreadable as reason:
            return str(reason)

    quick = read()
    monkeypatch.setattr(documents, "_orjson_loads", lambda: None)
    assert read() == quick
    monkeypatch.setattr(documents, "_orjson_loads", lambda: json.loads)  # it is asked first
    assert documents._strict_object(b'{"text": "a"}') == {"text": "a"}

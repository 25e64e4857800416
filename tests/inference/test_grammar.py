"""Texts that keep to a JSON schema, whatever the tokenizer; what comes before them; what cannot be kept to."""

import json
import random
import sys

import numpy as np
import pytest
import torch

from dtgpt.data.tokenizers.tokenizer import Bytes
from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.options import OPTIONS, Options, read_options
from dtgpt.inference.request import PromptJob
from dtgpt.util.errors import UserError
from tests.support.server import bytes_tokenizer, generator_of, tiny_model
from tests.support.vocabularies import KINDS, of_every_kind

pytest.importorskip("llguidance")
pytestmark = pytest.mark.slow(6)

SCHEMA = {
    "type": "object",
    "properties": {
        "fox": {"enum": ["the quick", "brown€"]},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "more": {"$ref": "#/$defs/more"},
    },
    "required": ["fox", "numbers", "more"],
    "additionalProperties": False,
    "$defs": {"more": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 2}]}},
}
END = 256  # of Bytes


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return of_every_kind(tmp_path_factory.mktemp("vocabularies"))


@pytest.fixture(scope="module")
def model():
    return generator_of(tiny_model(seq_length=256, init_std=0.3), bytes_tokenizer())


def guide_of(tokenizer, special=None, ids=(1,), **options):
    given = Options(**{"json_schema": json.dumps(SCHEMA), **options})
    return given.guide(PromptJob(list(ids), given, special=special or SpecialIds((END,))), tokenizer)


def allowed(guide):
    words = guide.allowed()
    assert words.dtype == torch.int32
    bits = np.unpackbits(words.numpy().astype("<i4").view(np.uint8), bitorder="little")  # 32 ids a word, lowest first
    return np.flatnonzero(bits).tolist()


def feed(guide, ids):
    for i in ids:
        assert i in allowed(guide)
        assert guide.take(i)


def check(text):
    found = json.loads(text)
    assert list(found) == ["fox", "numbers", "more"] and found["fox"] in ("the quick", "brown€")
    assert len(found["numbers"]) <= 3 and all(0 <= n <= 99 for n in found["numbers"])
    assert found["more"] is None or len(found["more"]) <= 2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "characters"])  # which has no braces
def test_whatever_is_drawn_of_what_is_allowed_is_json_of_the_schema(tokenizers, kind):
    tokenizer, draw = tokenizers[kind], random.Random(0)
    special = {i for i, size in enumerate(tokenizer.token_bytes()) if not size}
    for _ in range(5):
        guide, ids = guide_of(tokenizer, SpecialIds((tokenizer.end_of_text,))), []
        while not guide.ended:
            found = allowed(guide)
            assert found and not special & set(found) and max(found) < tokenizer.vocab_size
            ids.append(draw.choice(found))
            assert guide.take(ids[-1])
        before = tokenizer.encode_bare("a")
        check(tokenizer.decode([*before, *ids]).removeprefix(tokenizer.decode(before)))


@pytest.mark.parametrize("kind", ["bytes", "gpt2", "tokenizer.json", "sentencepiece", "byte fallback"])
def test_a_text_of_the_schema_may_come_as_a_tokenizer_cuts_it(tokenizers, kind):
    guide = guide_of(tokenizers[kind])
    begin = tokenizers[kind].encode_bare("a")
    ids = tokenizers[kind].encode_bare('a{"fox": "brown€", "numbers": [7, 42], "more": "日"}')
    assert ids[: len(begin)] == begin
    feed(guide, ids[len(begin) :])
    assert guide.ended


def test_an_id_that_is_not_allowed_is_not_taken():
    guide = guide_of(Bytes())
    assert allowed(guide) == [ord("{")] and not guide.take(ord("["))


def test_a_text_may_end_where_its_json_does():
    guide = guide_of(Bytes(), json_schema=json.dumps({"type": "integer"}), stop_token_ids=(7,))
    assert allowed(guide) == sorted(b"-0123456789")
    feed(guide, b"42")
    assert set(allowed(guide)) >= {7, END} and not guide.ended
    without = guide_of(Bytes(), json_schema=json.dumps({"type": "integer"}), ends=False)
    feed(without, b"42")
    assert END not in allowed(without)


def test_blanks_between_parts_have_a_limit():
    guide = guide_of(Bytes())
    feed(guide, b"{\n" + b" " * 64)
    assert allowed(guide) == [ord('"')]
    feed(guide, b'"fox" ')
    assert allowed(guide) == [ord(":")]


def test_texts_of_a_model_keep_to_a_schema(model):
    """Of random weights, drawn and greedy, several of a prompt."""
    asked = {"json_schema": SCHEMA, "max_new_tokens": 250, "details": True}
    found = model.generate("Fox:", num_return_sequences=3, seed=4, **asked)
    for one in [*found, model.generate("Fox:", seed=5, logit_bias={ord(" "): -100}, **asked)]:
        check(one.text)
        assert one.finish_reason == "stop" and len(one.ids) == len(one.text.encode())
    assert len({one.text for one in found}) == 3
    (alone,) = [model.generate("Fox:", seed=4, **asked)]
    assert alone.text == found[0].text
    cut = model.generate("Fox:", seed=4, **{**asked, "max_new_tokens": 9})
    assert cut.finish_reason == "length" and alone.text.startswith(cut.text)


def test_a_text_may_think_before_it_keeps_to_a_schema():
    """Within a thought, all but an end may come; behind it, the schema holds."""
    guide = guide_of(Bytes(), free_until="</think>", json_schema='{"type": "boolean"}')
    assert allowed(guide)[:256] == [*range(256)] and END not in allowed(guide)
    feed(guide, b"so {} it is</think>")
    assert allowed(guide) == sorted(b"tf")
    feed(guide, b"true")
    assert guide.ended


def test_what_is_behind_a_thought_in_its_last_token_counts(tokenizers):
    tokenizer = tokenizers["gpt2"]
    (last,) = tokenizer.encode_bare(">[")
    guide = guide_of(tokenizer, free_until="</think>", json_schema='{"type": "array", "maxItems": 0}')
    feed(guide, [*tokenizer.encode_bare("hm</think"), last, *tokenizer.encode_bare("]")])
    assert guide.ended


def test_a_token_may_begin_a_thought_at_the_beginning_alone():
    schema = '{"type": "array", "items": {"type": "null"}}'
    chosen = {"free_from": "#", "free_until": "</t>", "json_schema": schema}
    guide = guide_of(Bytes(), **chosen)
    assert allowed(guide) == [ord("#"), ord("[")]
    feed(guide, b"#why?</t>")
    assert allowed(guide) == [ord("[")]
    without = guide_of(Bytes(), **chosen)
    feed(without, b"[")
    assert ord("#") not in allowed(without)
    several = guide_of(Bytes(), **{**chosen, "free_from": "<think>"})  # no single token begins it
    assert allowed(several) == [ord("[")]


@pytest.mark.parametrize("schema, wrong", [
    ({"type": "thing"}, "cannot be kept to .*Invalid type: thing"),
    ({"type": "array", "uniqueItems": True}, "cannot be kept to .*uniqueItems"),
    ({"$ref": "#/$defs/none"}, "cannot be kept to .*does not exist"),
    ({"$ref": "https://example.com/schema"}, "cannot be kept to .*not present"),
    ({"type": "string", "pattern": "(?=a)"}, "cannot be kept to .*look-around"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "cannot be kept to .*Unsatisfiable"),
    ([1], r"json_schema=\[1\] is not a JSON schema; give an object"),
    ("{", "json_schema='{' is not a JSON schema"), (5, "json_schema=5 is not"), (True, "json_schema=True is not"),
    ("[" * 10**5, "is not a JSON schema"),
])  # fmt: skip
def test_a_schema_that_cannot_be_kept_to_is_a_sentence(model, schema, wrong):
    with pytest.raises(UserError, match=wrong) as caught:
        model.generate("x", json_schema=schema)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("options, wrong", [
    ({"min_new_tokens": 2}, "json_schema ends a text where its JSON ends; leave min_new_tokens out"),
    ({"no_repeat_ngram_size": 2}, "leave no_repeat_ngram_size out"),
    ({"num_beams": 2}, "a beam search does not take json_schema"),
])  # fmt: skip
def test_what_a_schema_cannot_be_combined_with_is_a_sentence(model, options, wrong):
    with pytest.raises(UserError, match=wrong):
        model.generate("x", json_schema=SCHEMA, **options)


def test_without_a_tokenizer_or_the_library_it_is_a_sentence(model, monkeypatch):
    with pytest.raises(UserError, match="json_schema is for texts, and this model's tokens have none"):
        guide_of(None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"needs the package llguidance, .*pip install 'dtgpt\[json\]'"):
        guide_of(Bytes())


def test_a_schema_of_the_command_line_is_a_file(tmp_path, model):
    of_words = OPTIONS["json_schema"].values.from_words
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    given = of_words("--json-schema", (str(tmp_path / "schema.json"),))
    assert read_options({"json_schema": given}, 1, model.config).json_schema == json.dumps(SCHEMA)
    assert of_words("--json-schema", ()) == ""
    for words, wrong in ((("a", "b"), "takes one file, and 2 are given"), ((str(tmp_path / "no"),), "cannot be read")):
        with pytest.raises(UserError, match=wrong):
            of_words("--json-schema", words)

"""A run carries its tokenizer: whatever `dtgpt prepare` took, a model is trained on it, resumed and sampled from."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiktoken

from dtgpt.data.library_tokenizers.byte_level import PATTERN, ByteLevel
from dtgpt.data.library_tokenizers.libraries import SentencePiece, TokenizerJson
from dtgpt.data.prepare.job import PrepareConfig, prepare
from dtgpt.data.tokenizers.open import load_tokenizer, make_tokenizer, open_tokenizer, read_saved
from dtgpt.inference.library.load import load
from dtgpt.inference.prompts import tokenizer_of
from dtgpt.interop.convert import ConvertOptions, convert
from dtgpt.run.differences.texts import changes_since
from dtgpt.run.folder import values_of
from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from dtgpt.util.errors import UserError
from tests.support.prepared import write_lines
from tests.support.runs import change, newest_run
from tests.support.vocabularies import sentencepiece_model, tokenizer_json

pytestmark = pytest.mark.slow(2)

TEXTS = [f"the quick brown fox number {i} jumps over Grüße 🎈" for i in range(120)]


def make(kind: str, folder: Path) -> str:
    """A file of this kind, as `dtgpt prepare --tokenizer` takes it."""
    if kind == "sentencepiece":
        return str(sentencepiece_model(folder))
    if kind == "tokenizer.json":
        return str(tokenizer_json(folder, bos=True))
    path = folder / "own.json"
    make_tokenizer("bpe", TEXTS, 300).save(path)
    return str(path)


@pytest.mark.parametrize("kind", ["sentencepiece", "tokenizer.json", "trained"])
def test_a_run_on_any_prepared_data_goes_on_and_is_sampled_without_the_tokenizers_file(recipe, tmp_path, kind):
    path = make(kind, tmp_path)
    documents = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS])
    prepare(PrepareConfig(
        input=documents, tokenizer=path, output_prefix=tmp_path / "out", append_eod=True, workers=1
    ))  # fmt: skip
    prepared = {"path": str(tmp_path / "out_text_document"), "tokenizer": "auto", "tokenizer_file": path}
    recipe = change(recipe, data={**prepared, "split": "90,10,0"}, model={"vocab_size": 512}, steps=4)
    train(replace(recipe, steps=2))
    run = newest_run(recipe)
    train(replace(recipe, resume=str(run)))
    known = open_tokenizer(path)
    Path(path).unlink()
    for folder in (run, run / "checkpoints" / "step_00000004"):
        kept = tokenizer_of(folder, recipe.model)
        assert type(kept) is type(known) and kept.ranks == known.ranks
        assert kept.encode(TEXTS[0]) == known.encode(TEXTS[0])
        assert (kept.end_of_text, kept.vocab_size) == (known.end_of_text, known.vocab_size)
    json.loads((run / "tokenizer.json").read_text())
    bits = [
        r["validation_bits_per_byte"] for r in read_records(run / "metrics.jsonl") if "validation_bits_per_byte" in r
    ]
    assert bits and all(0 < value < 20 for value in bits)
    convert(run, tmp_path / "exported", ConvertOptions())
    for model in (run, tmp_path / "exported"):
        assert load(model).generate("the quick", max_new_tokens=3, return_full_text=True).startswith("the quick")


@pytest.mark.parametrize("kind", ["sentencepiece", "tokenizer.json", "trained"])
def test_bytes_of_tokens_are_those_that_they_spell(tmp_path, kind):
    known = open_tokenizer(make(kind, tmp_path))
    sizes = known.token_bytes()
    assert sizes.shape == (known.vocab_size,) and sizes[known.end_of_text] == 0
    blank = kind == "sentencepiece"  # which puts one before every text
    for text in ("the quick", TEXTS[3]):
        assert sizes[known.encode(text)].sum() == len(text.encode()) + blank


def test_an_encoding_with_holes_survives_its_file(tmp_path):
    ranks = {bytes([b]): b for b in range(256)} | {b"ab": 258}
    encoding = tiktoken.Encoding(
        "own", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256, "<|x|>": 260}
    )
    known = ByteLevel.from_encoding(encoding)
    known.save(tmp_path / "t.json")
    for kept in (read_saved(tmp_path / "t.json", ""), open_tokenizer(str(tmp_path / "t.json"))):
        assert (
            kept.encode("abc<|x|>", special=True) == [258, 99, 260]
            and kept.decode([258, 256, 257]) == "ab<|endoftext|>\ufffd"
        )
        assert (kept.vocab_size, kept.num_tokens, kept.end_of_text) == (261, 259, 256)
        assert kept.token_bytes().tolist() == [1] * 256 + [0, 0, 2, 0, 0]


def test_tokenizers_of_older_runs_are_read(tmp_path):
    """Of the time before a tokenizer had special tokens of its own."""
    saved = {"name": "bytes", "pattern": PATTERN, "ranks": ["YQ==", "Yg=="]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    kept = load_tokenizer(tmp_path)
    assert kept.ranks == [b"a", b"b"] and (kept.end_of_text, kept.vocab_size) == (2, 3)
    assert kept.encode("ab") == [0, 1] and kept.decode([1, 2]) == "b<|endoftext|>"


@pytest.mark.parametrize("kind", ["sentencepiece", "tokenizer.json", "trained"])
@pytest.mark.parametrize("wrong", [-1, 100_000])
def test_an_id_that_a_vocabulary_does_not_know_is_named(tmp_path, kind, wrong):
    known = open_tokenizer(make(kind, tmp_path))
    with pytest.raises(
        UserError, match=rf"{wrong} is not a token of .*0 to {known.vocab_size - 1}; give the tokenizer"
    ):
        known.decode([5, wrong])


def test_two_tokenizers_for_the_same_data_are_refused(recipe):
    data = {"path": "x.bin", "tokenizer_file": "a.model"}
    with pytest.raises(UserError, match=r"a\.model and data\.tokenizer=gpt2 both name a tokenizer"):
        train(change(recipe, data={**data, "tokenizer": "gpt2"}))
    files = {**data, "tokenizer": "auto", "vocab_file": "v", "merge_file": "m"}
    with pytest.raises(UserError, match=r"a\.model and data\.vocab_file=v both name a tokenizer"):
        train(change(recipe, data=files, model={"vocab_size": 50257}))


def test_a_run_is_not_resumed_with_another_end_of_text(recipe, tmp_path):
    """The same tokens, of which another one ends a document."""
    ids = {"<|endoftext|>": 256, "</s>": 257}
    one, other = (ByteLevel("t", PATTERN, [bytes([b]) for b in range(256)], ids, ends=(end,)) for end in ids)
    for name, tokenizer in (("one", one), ("other", other)):
        tokenizer.save(tmp_path / f"{name}.json")
    data = prepare(PrepareConfig(
        input=write_lines(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS]), tokenizer=tmp_path / "one.json",
        output_prefix=tmp_path / "data", append_eod=True,
    )).files[0]  # fmt: skip
    Path(f"{data}.tokenizer.json").unlink()  # as Megatron-LM's data have none
    options = {"path": str(data), "tokenizer": "auto", "tokenizer_file": str(tmp_path / "one.json")}
    recipe = change(recipe, steps=1, data=options, model={"vocab_size": 258})
    train(recipe)
    again = change(
        recipe, steps=2, data={"tokenizer_file": str(tmp_path / "other.json")}, resume=str(newest_run(recipe))
    )
    with pytest.raises(UserError, match="was trained with another tokenizer"):
        train(again)


@pytest.mark.parametrize("kind, package", [("sentencepiece", "sentencepiece"), ("tokenizer.json", "tokenizers")])
def test_a_run_whose_package_is_missing_says_which(tmp_path, monkeypatch, kind, package):
    known = open_tokenizer(make(kind, tmp_path))
    assert isinstance(known, SentencePiece if kind == "sentencepiece" else TokenizerJson)
    (tmp_path / "run").mkdir()
    known.save(tmp_path / "run" / "tokenizer.json")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"needs the package {package}, which is missing; run pip install"):
        load_tokenizer(tmp_path / "run")


def test_a_flipped_bit_anywhere_in_a_runs_tokenizer_is_told(tmp_path):
    path = tmp_path / "tokenizer.json"
    make_tokenizer("bpe", TEXTS, 300).save(path)
    whole = path.read_bytes()
    place = whole.index(b'"pattern"')
    places = [*range(place, place + 120), *range(whole.index(b'"ranks"'), len(whole), 199)]
    for position in places:
        for bit in (0, 3, 6):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(UserError, match="copy it from another run"):
                load_tokenizer(tmp_path)


@pytest.mark.parametrize("change", [
    {"pattern": "(a|b"}, {"pattern": "(a*)*b\\1?(?!x)|"}, {"pattern": 7}, {"ranks": ["YQ==", "YQ=="]},
    {"ranks": ["Y@=="]}, {"specials": {"<|endoftext|>": 2_000_000_000}}, {"specials": {"<|endoftext|>": -1}},
    {"specials": []}, {"vocab_size": 2_000_000_000},
])  # fmt: skip
def test_a_saved_tokenizer_without_a_checksum_is_opened_with_care(tmp_path, change):
    """As a run of an older dtgpt has left it."""
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(ByteLevel("bytes", PATTERN, [bytes([b]) for b in range(256)]).to_json() | change)
    )
    with pytest.raises(UserError, match=r"tokenizer") as error:
        load_tokenizer(tmp_path).encode("what is none of that")
    assert "\n" not in str(error.value)


def test_metrics_and_recipes_that_python_cannot_follow_are_left_out(recipe, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("[" * 100_000 + "\n" + '{"step": ' + "9" * 5000 + '}\n{"step": 1}\n')
    assert read_records(tmp_path / "metrics.jsonl") == [{"step": 1}]
    for text in ("[" * 100_000, "9" * 5000):
        (tmp_path / "recipe.json").write_text(text)
        assert changes_since(tmp_path, values_of(recipe)) == []

"""Token files whose tokenizer lies beside them: what dtgpt prepare writes, and nanoGPT's meta.pkl."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from dtgpt.data.library_tokenizers.characters import Char, NoCharacters
from dtgpt.data.library_tokenizers.meta_pickle import read_meta
from dtgpt.data.megatron.ids import Ids
from dtgpt.data.megatron.indexed import bin_path, idx_path, tokenizer_path
from dtgpt.data.megatron.paths import is_prepared
from dtgpt.data.megatron.tokenizer_beside import tokenizer_beside
from dtgpt.data.prepare.job import PrepareConfig, join_datasets, prepare
from dtgpt.data.tokenizers.open import make_tokenizer, open_tokenizer, read_saved
from dtgpt.inference.library.load import load
from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from dtgpt.train.setup import read_dataset
from dtgpt.util.errors import UserError
from tests.support.prepared import write_lines
from tests.support.runs import change, newest_run

pytestmark = pytest.mark.slow(4)

TEXT = "the quick brown fox\njumps over it, Grüße 🎈\n" * 60


def nanogpt(folder, text=TEXT, **changes) -> Path:
    """As its data/shakespeare_char/prepare.py writes them."""
    folder.mkdir(exist_ok=True)
    characters = sorted(set(text))
    ids = {c: i for i, c in enumerate(characters)}
    for name, part in (("train", text[: len(text) * 9 // 10]), ("val", text[len(text) * 9 // 10 :])):
        np.array([ids[c] for c in part], np.uint16).tofile(folder / f"{name}.bin")
    meta = {"vocab_size": len(ids), "itos": dict(enumerate(characters)), "stoi": ids, **changes}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


@pytest.fixture
def chars(recipe, tmp_path):
    folder = nanogpt(tmp_path / "chars")
    data = {"path": str(folder / "train.bin"), "valid_path": str(folder / "val.bin"), "tokenizer": "auto"}
    return change(recipe, data=data, steps=2, model={"vocab_size": 64})


@pytest.mark.parametrize("kind", ["auto", "char"])
def test_nanogpts_characters_are_trained_sampled_and_generated(chars, kind):
    assert train(change(chars, data={"tokenizer": kind})) == 0
    run = newest_run(chars)
    kept = read_saved(run / "tokenizer.json", "")
    assert isinstance(kept, Char) and kept.decode(kept.encode("jumps Grüße 🎈")) == "jumps Grüße 🎈"
    per_byte = [r for r in read_records(run / "metrics.jsonl") if "validation_loss" in r][-1]
    per_token = len(TEXT.encode()) / len(TEXT) * np.log(2)
    assert per_byte["validation_bits_per_byte"] == pytest.approx(per_byte["validation_loss"] / per_token, rel=0.1)
    assert set((run / "samples" / "step_00000002.txt").read_text()) <= {*TEXT, "\ufffd"}
    model = load(run)
    assert {len(model.generate(prompt, max_new_tokens=4)) for prompt in ("the q", "")} == {4}
    with pytest.raises(UserError, match="does not know the character 'Z'"):
        model.generate("Z")


def test_ids_need_no_tokenizer(chars):
    (Path(chars.data.path).parent / "meta.pkl").unlink()
    with pytest.raises(UserError, match=r"tokens of an unknown tokenizer.*--data.tokenizer_file.*or ids for losses"):
        read_dataset(chars)
    with pytest.raises(UserError, match=r"but the model has 20 tokens; give a larger --model.vocab_size: token 2\d is"):
        read_dataset(change(chars, data={"tokenizer": "ids"}, model={"vocab_size": 20}))
    assert train(change(chars, data={"tokenizer": "ids"})) == 0
    run = newest_run(chars)
    assert isinstance(read_saved(run / "tokenizer.json", ""), Ids) and not (run / "samples").exists()
    records = read_records(run / "metrics.jsonl")
    assert any("validation_loss" in r for r in records) and "bits_per_byte" not in (run / "metrics.jsonl").read_text()
    for prompt in ("", "the"):
        with pytest.raises(UserError, match=r"trained on token ids alone \(data.tokenizer=ids\)"):
            load(run).generate(prompt, max_new_tokens=4)
    assert len(load(run).generate([1, 2], max_new_tokens=4)) == 4


@pytest.mark.parametrize("options, words", [
    ({"data": {"tokenizer": "bytes"}}, ["data.tokenizer=bytes is not the tokenizer that", "meta.pkl", "(char, 27"]),
    ({"data": {"tokenizer": "bpe", "bpe_vocab_size": 60}}, ["data.tokenizer=bpe is trained on plain text"]),
    ({"log": {"prompt": "ZZ"}}, ["does not know the character 'Z'"]),
    ({"data": {"eod_mask_loss": True}}, ["data.eod_mask_loss=on needs an end of text"]),
    ({"data": {"tokenizer": "ids"}, "log": {"prompt": "x"}}, ["data.tokenizer=ids"]),
    ({"data": {"valid_path": None}}, ["1 document", "leaves none for validation", "--data.valid_path", "val.bin"]),
    ({"model": {"vocab_size": 20}}, ["model.vocab_size=20 is smaller than the tokenizer's 27"])
])  # fmt: skip
def test_what_does_not_go_with_characters_is_told_before_a_run_begins(chars, options, words):
    with pytest.raises(UserError) as error:
        train(change(chars, **options))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert not Path(chars.runs).exists()


class Hostile:
    def __reduce__(self):
        return os.system, ("touch /tmp/hostile-meta",)


@pytest.mark.parametrize("content, words", [
    (pickle.dumps(Hostile()), "holds <posix.system>, not a dictionary"),
    (pickle.dumps({"stoi": Hostile()}), "its stoi is not a dictionary"),
    (pickle.dumps({"stoi": {"a": 0}, "vocab_size": Hostile()}), "its vocab_size is <posix.system>"),
    (pickle.dumps(np.arange(3)), "holds <numpy"), (b"", "is not nanoGPT's"),
    (pickle.dumps({"stoi": {"a": 0}})[:-3], "is not nanoGPT's"), (pickle.dumps([1]), r"holds \[1\], not a dictionary"),
    (pickle.dumps({"stoi": {"ab": 0}}), "not a character and its id"),
    (pickle.dumps({"stoi": {"a": 2**40}}), "not a character and its id"),
    (pickle.dumps({"stoi": {"a": -1}}), "not a character and its id"),
    (pickle.dumps({"stoi": {"a": 1, "b": 1}}), "gives an id to two characters"),
    (pickle.dumps({"stoi": {"a": 0}, "itos": {0: "b"}}), "do not agree"),
    (pickle.dumps({"stoi": {"a": 3}, "vocab_size": 3}), "its vocab_size is 3, its largest id 3")
])  # fmt: skip
def test_other_pickles_are_refused_and_run_nothing(tmp_path, content, words):
    (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_meta(tmp_path / "meta.pkl")
    assert not Path("/tmp/hostile-meta").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_meta_of_any_protocol_is_read(tmp_path, protocol):
    meta = {"vocab_size": 5, "stoi": {"a": 0, "\n": 3}, "itos": {0: "a", 3: "\n"}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta, protocol))
    known = open_tokenizer(str(tmp_path / "meta.pkl"))
    assert (known.vocab_size, known.opening, known.encode("a\n")) == (5, 3, [0, 3])
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 50304}, protocol))
    with pytest.raises(NoCharacters, match="names no characters"):
        read_meta(tmp_path / "meta.pkl")
    assert tokenizer_beside([str(tmp_path / "train.bin")]) is None
    (tmp_path / "meta.pkl").write_bytes(b"\x80\x04}r\xff\xff\xff\xff.")  # Python's own makes room for 2^32 values
    with pytest.raises(NoCharacters):
        read_meta(tmp_path / "meta.pkl")


def test_a_text_may_be_trained_as_characters(recipe):
    dataset = read_dataset(change(recipe, data={"tokenizer": "char"}))
    text = Path(recipe.data.path).read_text()
    assert dataset.tokenizer.decode([*dataset.train[:], *dataset.valid[:]]) == text


@pytest.fixture
def prepared(recipe, tmp_path):
    """Prepared with a BPE of its own, whose file is gone."""
    own = tmp_path / "own.json"
    make_tokenizer("bpe", [TEXT], 280).save(own)
    documents = write_lines(tmp_path / "in.jsonl", [{"text": TEXT[i : i + 40]} for i in range(200)])
    prepare(PrepareConfig(input=documents, tokenizer=own, output_prefix=tmp_path / "out", append_eod=True, workers=1))
    own.unlink()
    data = {"path": str(tmp_path / "out_text_document"), "tokenizer": "auto", "split": "90,10,0"}
    return change(recipe, data=data, model={"vocab_size": 280})


@pytest.mark.parametrize("vocab_size", [280, 50304])
def test_prepared_data_remember_their_tokenizer(prepared, vocab_size):
    recipe = change(prepared, model={"vocab_size": vocab_size})
    recipe.validate()
    dataset = read_dataset(recipe.resolved())
    assert dataset.tokenizer.name == "bpe"
    assert json.loads(tokenizer_path(recipe.data.path).read_text())["name"] == "bpe"


@pytest.mark.parametrize("damage", ["other", "broken"])
def test_a_tokenizer_that_contradicts_or_is_damaged_is_told(prepared, damage):
    if damage == "broken":
        tokenizer_path(prepared.data.path).write_text("{")
        with pytest.raises(UserError, match=r"tokenizer.json cannot be read .*prepare the data again, or remove it"):
            read_dataset(prepared)
    with pytest.raises(UserError, match=r"tokenizer=bytes is not .*tokenizer.json says|tokenizer.json cannot be read"):
        read_dataset(change(prepared, data={"tokenizer": "bytes"}))


def test_merging_keeps_the_tokenizer_and_refuses_two(prepared, tmp_path, capsys):
    one = prepared.data.path
    join_datasets(PrepareConfig(merge=(one, one), output_prefix=str(tmp_path / "both")))
    assert tokenizer_path(tmp_path / "both").read_bytes() == tokenizer_path(one).read_bytes()
    other = write_lines(tmp_path / "b.jsonl", [{"text": "b"}])
    prepare(PrepareConfig(input=other, tokenizer="bytes", output_prefix=tmp_path / "b", workers=1))
    two = str(tmp_path / "b_text_document")
    with pytest.raises(UserError, match="are different tokenizers"):
        join_datasets(PrepareConfig(merge=(one, two), output_prefix=str(tmp_path / "no")))
    assert not idx_path(tmp_path / "no").exists() and not bin_path(tmp_path / "no").exists()
    with pytest.raises(UserError, match="are different tokenizers"):
        read_dataset(change(prepared, data={"path": f"{one} {two}"}))
    tokenizer_path(two).unlink()
    join_datasets(PrepareConfig(merge=(one, two), output_prefix=str(tmp_path / "half")))
    assert not tokenizer_path(tmp_path / "half").exists()
    assert "is saved without its tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("rows, told", [(257, False), (384, False), (512, True), (1024, True)])
def test_rows_that_no_token_uses_are_told_once(recipe, capsys, rows, told):
    read_dataset(change(recipe, model={"vocab_size": rows}))
    words = f"model.vocab_size={rows}, but the tokenizer bytes has 257 tokens: {rows - 257} rows"
    assert capsys.readouterr().err.count(words) == told


@pytest.mark.parametrize("path, words", [
    ("it's A", ['data.path="it\'s A" cannot be cut', "double quotes"]),
    ('0.3 "A 0.7 B', ["cannot be cut", "No closing quotation"]), ("A \\", ["cannot be cut"]),
    ("{0} {0}", ["text.txt is a text, and a run takes one text alone", "dtgpt prepare"]),
    ("0.5 {0} 0.5 {0}", ["text.txt is a text"]),
    ("0.5 " + "a" * 300 + " 0.5 " + "b" * 5000, ["there is no dataset aaa"]),
    ("a" * 300 + ".bin", ["there is no dataset aaa"])
])  # fmt: skip
def test_data_paths_that_cannot_be_are_one_sentence(recipe, path, words):
    broken = change(recipe, data={"path": path.format(recipe.data.path)})
    assert is_prepared(broken.data.path)
    with pytest.raises(UserError) as error:
        train(broken)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("path", ["a" * 300, "x/" + "b" * 5000])
def test_names_too_long_for_a_file_are_told(recipe, path):
    with pytest.raises(UserError, match="does not exist"):
        train(change(recipe, data={"path": path}))


def test_a_text_of_three_tokens_is_refused(recipe):
    Path(recipe.data.path).write_text("ab")
    with pytest.raises(UserError, match=r"has 3 tokens, but .* at least 17; use more text, a shorter --seq_l"):
        read_dataset(change(recipe, data={"held_out": 0.0}))

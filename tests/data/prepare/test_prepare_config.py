"""`dtgpt prepare` from Python, the tokenizers that it is told, and its list of broken lines."""

import json

import numpy as np
import pytest

import dtgpt.data.prepare
from dtgpt.data.megatron.indexed import IndexedDataset
from dtgpt.data.prepare.job import PrepareConfig, prepare
from dtgpt.data.prepare.progress import Progress
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.util.errors import UserError
from tests.support.prepared import leftovers, run, words_of, write_lines
from tests.support.vocabularies import sentencepiece_model, tokenizer_json


def test_python_values_are_taken_for_words(tmp_path):
    assert dtgpt.data.prepare.prepare is prepare and dtgpt.data.prepare.PrepareConfig is PrepareConfig
    path = tmp_path / "h.jsonl"
    write_lines(path, [{"text": "a"}])
    config = PrepareConfig(input=path, output_prefix=tmp_path / "out", tokenizer="bytes", append_eod=True, strict=False)
    assert (config.input, config.append_eod, config.strict) == ((str(path),), True, False)
    prepare(config)
    assert IndexedDataset(tmp_path / "out_text_document").window(0).tolist() == [97, 256]
    assert PrepareConfig(input=str(path)).input == PrepareConfig(input=[path]).input == (str(path),)


@pytest.mark.parametrize("wrong, words", [
    ({"append_eod": "yes"}, "append_eod='yes' is not valid; use True or False"),
    ({"append_eod": 1}, "append_eod=1 is not valid; use True or False"),
    ({"workers": "2"}, "workers='2' is not valid; use a whole number"),
    ({"workers": True}, "workers=True is not valid; use a whole number"),
    ({"input": 5}, "input=5 is not valid; use a list of texts"),
    ({"json_keys": ("a", 5)}, "json_keys=.* is not valid; use a list of texts"),
    ({"tokenizer": None}, "tokenizer=None is not valid; use text"),
    ({"vocab_file": 5}, "vocab_file=5 is not valid; use text or none"),
    ({"txt": "word"}, "txt='word' is not valid; use one of file, line"),
    ({"log_interval": -1}, "log_interval=-1 is out of range; use 0 or more"),
])  # fmt: skip
def test_values_of_another_type_are_refused(wrong, words):
    with pytest.raises(UserError, match=words):
        PrepareConfig(**{"input": "a.jsonl", "output_prefix": "out"} | wrong).validate()


def ids_of(dataset):
    return [dataset.window(i).tolist() for i in range(len(dataset))]


def test_what_a_tokenizer_json_adds_is_in_every_piece_once(tmp_path):
    path = tokenizer_json(tmp_path, bos=True)
    documents = [{"text": ["the", "", "fox"]}, {"text": ""}]
    plain = ids_of(run(tmp_path, documents, tokenizer=path, append_eod=True)[1])
    assert [ids[0] for ids in plain] == [0, 0, 0, 0] and plain[1] == [0] and plain[3] == [0, 1]
    assert ids_of(run(tmp_path, documents, tokenizer=path, append_eod=True, prepend_bos=True)[1]) == plain


@pytest.mark.parametrize("damage", [
    lambda saved: saved["model"].pop("merges"), lambda saved: saved.update(pre_tokenizer=[1]),
    lambda saved: saved["model"].update(merges=7), lambda saved: saved["model"].update(vocab=[1]),
    lambda saved: saved.update(added_tokens=[1]), lambda saved: saved.update(post_processor={"type": "Sequence"})
])  # fmt: skip
def test_a_damaged_tokenizer_json_is_refused_in_the_words_of_its_library(tmp_path, damage):
    path = tokenizer_json(tmp_path)
    saved = json.loads(path.read_text())
    damage(saved)
    path.write_text(json.dumps(saved))
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer\.json") as error:
        open_tokenizer(str(path))
    assert "\n" not in str(error.value)


def test_llama_2_opens_also_empty_texts(tmp_path):
    path = sentencepiece_model(tmp_path)
    documents = [{"text": "the fox"}, {"text": ""}]
    (plain,) = ids_of(run(tmp_path, documents, tokenizer=path)[1])
    llama = {"tokenizer": path, "tokenizer_type": "Llama2Tokenizer"}
    for more in ({}, {"prepend_bos": True}):
        assert ids_of(run(tmp_path, documents, **llama, **more)[1]) == [[1, *plain], [1]]
    assert ids_of(run(tmp_path, documents, tokenizer=path, tokenizer_type="SentencePieceTokenizer")[1]) == [plain]


def test_the_type_of_ids_follows_the_number_of_tokens_unless_they_do_not_fit(tmp_path, capsys):
    path = tokenizer_json(tmp_path)
    saved = json.loads(path.read_text())
    for largest, dtype in ((65_535, np.uint16), (65_536, np.int32)):
        saved["model"]["vocab"]["far"] = largest
        path.write_text(json.dumps(saved))
        assert run(tmp_path, [{"text": "the"}], tokenizer=path)[1].dtype == dtype
    assert "281 tokens but ids up to 65,536" in capsys.readouterr().err


def test_all_broken_lines_can_be_listed(tmp_path, capsys):
    for name, count in (("a", 30), ("b", 1)):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "ok"}\n' + '{"no": 1}\n' * count)
    inputs, listed = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "broken.jsonl"
    config = {"input": inputs, "output_prefix": tmp_path / "out", "tokenizer": "bytes", "workers": 1, "broken": listed}
    prepare(PrepareConfig(**config))
    lines = [json.loads(line) for line in listed.read_text().splitlines()]
    assert len(lines) == 31 and lines[30] == {"source": str(inputs[1]), "line": 2, "reason": "no key 'text'"}
    told = capsys.readouterr().err
    assert f"{inputs[0]}: 30 broken lines left out" in told and f"{inputs[1]}: 1 broken line left out" in told
    with pytest.raises(UserError, match="no key"):
        prepare(PrepareConfig(**config | {"strict": True, "overwrite": True, "broken": tmp_path / "out.list"}))
    assert "out.list" not in " ".join(leftovers(tmp_path)) and words_of(IndexedDataset(tmp_path / "out_text_document"))
    with pytest.raises(UserError, match=r"--broken .* is a folder; give another --broken, such as a file in it"):
        prepare(PrepareConfig(**config | {"overwrite": True, "broken": tmp_path}))
    with pytest.raises(UserError, match=r"x cannot be written \(No such file or directory\); give another --broken"):
        prepare(PrepareConfig(**config | {"overwrite": True, "broken": tmp_path / "none" / "x"}))


def test_a_list_of_broken_lines_does_not_appear_when_nothing_is_written(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"no": 1}\n')
    config = {"input": tmp_path / "in.jsonl", "output_prefix": tmp_path / "out", "tokenizer": "bytes", "workers": 1}
    for _ in range(2):  # the same command again is not refused for what the first has left
        with pytest.raises(UserError, match="holds no document that can be read, but 1 broken line"):
            prepare(PrepareConfig(**config, broken=tmp_path / "out.list"))
        assert leftovers(tmp_path) == []


def test_a_warning_does_not_share_its_line_with_the_progress(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("dtgpt.data.prepare.progress.REDRAW", 0.0)
    progress = Progress(total=None)
    progress.update(5, 5, 0)
    progress.clear()
    drawn = capsys.readouterr().err
    assert drawn.endswith("\r") and len(drawn.split("\r")[-2].strip()) == 0
    progress.clear()
    assert capsys.readouterr().err == ""

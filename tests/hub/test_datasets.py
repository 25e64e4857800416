"""Data sets and tokenizers of the Hub, by the package datasets itself, from a cache that is made by hand: nothing here
needs a network."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import dtgpt
from dtgpt.data.prepare import PrepareConfig, prepare
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.hub import rows
from dtgpt.train.loop import train
from dtgpt.train.start import override
from dtgpt.util.errors import UserError
from tests.hub.test_hub import cache, keep  # noqa: F401
from tests.support.runs import change
from tests.support.vocabularies import tokenizer_json

datasets = pytest.importorskip("datasets", minversion="4")

pytestmark = pytest.mark.slow(6)
ROWS = [{"text": f"the quick brown fox {i} ½ jumps", "more": None, "n": i, "raw": b"\xff"} for i in range(300)]
CHATS = [[{"role": "user", "content": f"how many? {i}"}, {"role": "assistant", "content": str(i)}] for i in range(9)]


@pytest.fixture
def kept(cache, tmp_path, monkeypatch) -> Path:  # noqa: F811
    """The data sets org/tiny and org/chats in the cache of datasets, as it makes them of folders of the same name."""
    home = tmp_path / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home)
    monkeypatch.chdir(tmp_path)
    for name, found in (("tiny", ROWS), ("chats", [{"messages": chat, "source": "me"} for chat in CHATS])):
        Path(name).mkdir()
        for split, part in (("train", found), ("test", found[:2])):
            datasets.Dataset.from_list(part).to_parquet(f"{name}/{split}.parquet")
        datasets.load_dataset(name, cache_dir=str(home))
        shutil.rmtree(name)
        shutil.move(home / name, home / f"org___{name}")
    return home


def test_a_data_set_is_prepared_as_its_rows_in_a_file(kept):
    Path("rows.jsonl").write_text("".join(json.dumps({"text": row["text"]}) + "\n" for row in ROWS))
    options = {"tokenizer": "bytes", "append_eod": True, "workers": 1}
    made = {}
    for name, given in (("file", "rows.jsonl"), ("hub", "hf:org/tiny"), ("split", "hf:org/tiny:train")):
        summary = prepare(PrepareConfig(input=given, output_prefix=name, **options))
        assert summary.documents == 300 and summary.broken == 0
        made[name] = Path(f"{name}_text_document.bin").read_bytes()
    assert made["file"] == made["hub"] == made["split"]
    prepare(PrepareConfig(input="hf:org/tiny:default:test[:1]", output_prefix="one", **options))
    found = np.fromfile("one_text_document.bin", np.uint16)
    assert open_tokenizer("bytes").decode(found[:-1]) == ROWS[0]["text"]


def test_chats_are_read_by_name(kept, capsys):
    folder = Path("tokenizer")
    folder.mkdir()
    tokenizer_json(folder, end="<|im_end|>")
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    summary = prepare(PrepareConfig(input="hf:org/chats", output_prefix="mine", tokenizer="tokenizer", chat=True))
    assert summary.documents == 9 and summary.counted > 0
    assert "nothing used these keys: source" in capsys.readouterr().out


def test_a_run_trains_on_a_data_set_and_goes_on(kept, recipe, capsys):
    named = change(recipe, steps=2, data={"path": "hf:org/tiny"})
    assert train(named) == 0
    (run,) = Path(recipe.runs).iterdir()
    assert train(override(named, ["--resume", str(run), "--steps", "3"])) == 0
    Path("rows.jsonl").write_text("".join(json.dumps({"text": row["text"]}) + "\n" for row in ROWS))
    state = json.loads((run / "checkpoints" / "step_00000003" / "state.json").read_text())
    assert train(change(recipe, steps=2, name="file", data={"path": "rows.jsonl"})) == 0
    same = json.loads((Path(recipe.runs) / "file-001" / "checkpoints" / "step_00000002" / "state.json").read_text())
    assert same["data_digest"] == state["data_digest"]


@pytest.mark.parametrize(
    "name, told",
    [
        ("hf:org/none", r"hf:org/none could not be fetched \(Couldn't reach .*\); correct the name, run hf auth"),
        ("hf:org/tiny:nope", r'hf:org/tiny:nope: Unknown split "nope".*; write hf:ORG/NAME, hf:ORG/NAME:SPLIT'),
        (
            "hf:org/tiny:nope:train",
            r"hf:org/tiny:nope:train: Couldn't find cache for org/tiny for config 'nope'",
        ),
        ("hf:../tiny", r"'hf:../tiny' names no data set of the Hub; write hf:ORG/NAME"),
        ("hf:org/tiny:a:b:c", r"names no data set of the Hub"),
        ("hf:", r"names no data set of the Hub"),
    ],
)
def test_what_cannot_be_had_is_refused_in_a_sentence(kept, name, told):
    with pytest.raises(UserError, match=told):
        prepare(PrepareConfig(input=name, output_prefix="mine", tokenizer="bytes"))
    assert not list(Path().glob("mine*"))


def test_columns_that_are_no_texts_are_refused(kept, recipe, monkeypatch):
    with pytest.raises(UserError, match=r"has the columns 'text', 'more', 'n', 'raw', and none is 'body'; give one of"):
        prepare(PrepareConfig(input="hf:org/tiny", output_prefix="mine", tokenizer="bytes", json_keys=("body",)))
    with pytest.raises(UserError, match=r"row 1 has 0 as n, which is no text; give another key"):
        train(change(recipe, data={"path": "hf:org/tiny", "json_key": "n"}))
    assert b"".join(rows.lines("hf:org/tiny:test", ("raw", "more"))).splitlines()[0] == b'{"more": null, "raw": null}'
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=r"hf:org/tiny needs the package datasets, which is missing; run pip"):
        prepare(PrepareConfig(input="hf:org/tiny", output_prefix="mine", tokenizer="bytes"))


def test_a_tokenizer_of_the_hub_is_that_of_its_folder(cache, tmp_path, monkeypatch):  # noqa: F811
    """Its weights, which are not in the cache, are not asked for."""
    (tmp_path / "folder").mkdir()
    path = tokenizer_json(tmp_path / "folder")
    keep(cache, tmp_path / "folder")
    monkeypatch.chdir(tmp_path)
    named = open_tokenizer("hf:org/tiny@v1")
    assert named.is_same(open_tokenizer(str(path)))
    Path("new.txt").write_text("two words\n")
    assert open_tokenizer("hf:org/tiny + new.txt").encode("two words") == [named.vocab_size]
    Path("text.txt").write_text("the quick brown fox " * 9)
    prepare(PrepareConfig(input="text.txt", output_prefix="mine", tokenizer="hf:org/tiny"))
    assert open_tokenizer("mine_text_document.tokenizer.json").is_same(named)
    with pytest.raises(UserError, match=r"hf:org/tiny has no weights in safetensors"):
        dtgpt.load("hf:org/tiny")
    with pytest.raises(UserError, match=r"hf:org/other is not in the cache"):
        open_tokenizer("hf:org/other")

"""A run that begins with a model takes the model's tokenizer: ids of another one mean other rows of its embedding."""

import json
import shutil
from dataclasses import replace

import pytest

from dtgpt.data.prepare.job import PrepareConfig, prepare
from dtgpt.data.tokenizers.open import load_tokenizer, make_tokenizer, open_tokenizer
from dtgpt.interop.convert import ConvertOptions, convert
from dtgpt.train.loop import train
from dtgpt.train.start import checked, override, settle
from dtgpt.util.errors import UserError
from tests.support.prepared import write_lines
from tests.support.runs import change, newest_run
from tests.support.vocabularies import tokenizer_json

pytestmark = pytest.mark.slow(3)

TEXTS = [f"the quick brown fox number {i} jumps over Grüße" for i in range(300)]
VARIED = [f"{text} {i * 7919 % 1000}abc{i}" for i, text in enumerate(TEXTS)]
SIZE = 400


@pytest.fixture
def raw(recipe, tmp_path):
    """A recipe on a raw text, which names no tokenizer."""
    text = write_lines(tmp_path / "raw.jsonl", [{"text": text} for text in TEXTS])
    data = {"path": str(text), "tokenizer": "auto", "held_out": 0.0}
    return change(recipe, data=data, model={"vocab_size": SIZE}, steps=1, log={"eval_interval": 0, "sample_tokens": 2})


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Where the models are, once they are made."""
    return tmp_path_factory.mktemp("models") / "made"


@pytest.fixture
def models(raw, tmp_path, template):
    """A model by the kind of its files, with a tokenizer of 300 tokens, its weights random."""
    if not template.exists():
        make_tokenizer("bpe", TEXTS, 300).save(template.with_name("own.json"))
        train(change(raw, data={"tokenizer_file": str(template.with_name("own.json"))}, name="first"))
        shutil.copytree(newest_run(raw), template / "runs" / "first-001")
        for kind in ("hf", "dtgpt", "megatron"):
            convert(newest_run(raw), template / kind, ConvertOptions(to=kind))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(template / "hf" / name, template / "megatron")
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    run, tree = tmp_path / "runs" / "first-001", next((tmp_path / "megatron").glob("*/mp_rank_00")).parent
    kinds = {kind: tmp_path / kind for kind in ("hf", "dtgpt", "megatron")}
    return {**kinds, "iteration": tree, "run": run, "checkpoint": next((run / "checkpoints").glob("step_*"))}


def test_a_text_gets_the_tokenizer_of_the_model(raw, models):
    for kind, path in models.items():
        begun = settle(change(raw, name=f"of-{kind}"), {"init_from": [str(path)]})
        checked(begun)
        checked(replace(begun, model=replace(begun.model, vocab_size=60000)))
        if kind in ("hf", "megatron", "run"):
            train(begun)
            assert load_tokenizer(newest_run(begun)).ranks == load_tokenizer(models["run"]).ranks
            assert json.loads((newest_run(begun) / "recipe.json").read_text())["data"]["tokenizer_file"]


def test_a_run_goes_on_without_the_files_of_the_model_that_it_began_with(raw, models, capsys):
    begun = settle(change(raw, name="on"), {"init_from": [str(models["hf"])]})
    train(begun)
    run, tokenizer = newest_run(begun), load_tokenizer(newest_run(begun))
    again = override(raw, ["--resume", str(run), "--steps", "2"])
    assert again.data.tokenizer_file == str(models["hf"])
    shutil.rmtree(models["hf"])
    train(override(raw, ["--resume", str(run), "--steps", "2"]))
    assert load_tokenizer(run).ranks == tokenizer.ranks
    assert "the recipe file says data" not in capsys.readouterr().out


@pytest.mark.parametrize("named, words", [
    (["--data.tokenizer", "bytes"], None), (["--data.tokenizer", "bpe", "--data.bpe_vocab_size", "290"], None),
    (["--data.tokenizer", "bpe"], "1024 is more than the 400 tokens of .*; use --data.bpe_vocab_size 400, or leave"),
    (["--data.tokenizer", "char"], None), (["--data.tokenizer_file", "own.json"], None),
    (["--data.tokenizer_file", "large.json"], "has 500 tokens, the model 400"),
])  # fmt: skip
def test_another_tokenizer_is_taken_where_an_option_names_it_and_it_fits(raw, models, tmp_path, capsys, named, words):
    if words and "500" in words:
        make_tokenizer("bpe", VARIED, 500).save(tmp_path / "large.json")
    shutil.copy(models["run"] / "tokenizer.json", tmp_path / "own.json")
    options = ["--init_from", str(models["hf"]), *named]
    options = [str(tmp_path / word) if word.endswith(".json") else word for word in options]
    if words:
        with pytest.raises(UserError, match=words):
            train(override(raw, options))
        return
    train(override(raw, options))
    assert ("its embeddings mean other tokens" in capsys.readouterr().err) == ("own.json" not in str(named))


def test_another_tokenizer_of_the_recipe_file_is_refused(raw, models):
    refused = r"was trained with another tokenizer \(.*300 tokens\) than .*--data\.tokeniz"
    other = {"tokenizer": "bpe", "bpe_vocab_size": 300, "held_out": 0.5}
    for kind, path in models.items():
        with pytest.raises(UserError, match=refused):
            train(
                settle(change(raw, data=other if kind == "hf" else {"tokenizer": "bytes"}), {"init_from": [str(path)]})
            )
    train(override(change(raw, data=other), ["--init_from", str(models["hf"]), "--data.tokenizer", "auto"]))
    train(settle(change(raw, data={**other, "other_tokenizer": True}), {"init_from": [str(models["hf"])]}))


def test_a_model_without_a_tokenizer_says_what_to_do(raw, models):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (models["hf"] / name).unlink()
    for changes in ({}, {"data": {"path": None}}, {"model": {"vocab_size": 60000}}):
        with pytest.raises(UserError, match=r"hf has no tokenizer by which .*--data\.tokenizer_file F") as told:
            checked(replace(change(raw, **changes), init_from=str(models["hf"])))
        assert "\n" not in str(told.value)
    train(override(raw, ["--init_from", str(models["hf"]), "--data.tokenizer", "bytes"]))


def test_a_tokenizer_larger_than_the_model_is_refused(raw, models):
    make_tokenizer("bpe", VARIED, 500).save(models["hf"] / "tokenizer.json")
    with pytest.raises(UserError, match="has 500 tokens, the model 400; give the one that the model was trained with"):
        checked(override(raw, ["--init_from", str(models["hf"])]))


def prepared(raw, tmp_path, tokenizer):
    made = prepare(PrepareConfig(
        input=[raw.data.path], tokenizer=str(tokenizer), output_prefix=tmp_path / "data", append_eod=True, workers=1
    )).files[0]  # fmt: skip
    return change(raw, data={"path": str(made), "held_out": 0.05, "split": "100,0,0"})


def test_prepared_data_of_another_tokenizer_are_refused(raw, models, tmp_path, capsys):
    tokenizer = tokenizer_json(tmp_path, bos=True)
    other = prepared(raw, tmp_path, tokenizer)
    for path in models.values():
        with pytest.raises(UserError, match=r"another tokenizer .*300 tokens.* than data\.path=.*dtgpt prepare TEXT"):
            train(override(other, ["--init_from", str(path)]))
    with pytest.raises(UserError, match=r"300 tokens.*; prepare a text with it"):
        train(override(other, ["--init_from", str(models["hf"]), "--data.tokenizer", "auto"]))
    capsys.readouterr()
    train(override(other, ["--init_from", str(models["hf"]), "--data.tokenizer_file", str(tokenizer)]))
    assert "its embeddings mean other tokens" in capsys.readouterr().err


def test_prepared_data_of_the_models_tokenizer_are_taken(raw, models, tmp_path, capsys):
    """Also where nothing beside them names it."""
    own = prepared(raw, tmp_path, models["hf"])
    train(override(own, ["--init_from", str(models["hf"])]))
    (tmp_path / "data_text_document.tokenizer.json").unlink()
    begun = override(own, ["--init_from", str(models["hf"])])
    train(begun)
    assert load_tokenizer(newest_run(begun)).is_same(open_tokenizer(str(models["hf"])))
    assert "embeddings mean" not in capsys.readouterr().err


def test_a_text_is_trained_on_with_any_tokenizers_file(raw, tmp_path):
    tokenizer = tokenizer_json(tmp_path, bos=True)
    train(change(raw, data={"tokenizer_file": str(tokenizer)}))
    assert load_tokenizer(newest_run(raw)).is_same(open_tokenizer(str(tokenizer)))
    with pytest.raises(UserError, match=r"names no end of text.*eos_token in a tokenizer_config\.json"):
        train(change(raw, data={"tokenizer_file": str(tokenizer_json(tmp_path, end="[STOP]"))}))

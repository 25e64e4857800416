"""Texts end at the ids at which transformers' `generate` stops, in every door."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import dtgpt
from dtgpt.data.library_tokenizers.chat_template import template_of
from dtgpt.data.prepare.job import PrepareConfig, prepare
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.interop.convert import ConvertOptions, convert
from dtgpt.interop.hf.origin import read_origin
from dtgpt.interop.inspect import inspect
from dtgpt.serve.app import make_app
from dtgpt.train.init_from.shape import open_config
from dtgpt.train.loop import train
from dtgpt.train.setup import open_trainer
from dtgpt.train.start import override
from dtgpt.util.errors import UserError
from tests.support.bodies_grpo import Low
from tests.support.chats import NAMES, write_tokenizer
from tests.support.huggingface_llamas import their_model
from tests.support.prepared import write_lines
from tests.support.runs import change, newest_run
from tests.support.server import client, served

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow(12)

VOCABULARY, NEW = 296, 24  # the tokens of the tokenizer
PROMPT = [280, 281, 282]
UNSAID = "this file does not say"


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A model without a tokenizer."""
    folder = tmp_path_factory.mktemp("ends") / "model"
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 128}
    their_model("llama 2", **sizes).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def free(bare) -> list[int]:
    """The likeliest tokens, without an end."""
    return theirs(bare)


def theirs(folder: Path, **options) -> list[int]:
    """What transformers generates."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    with torch.no_grad():
        ids = model.generate(torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), **given)
    return ids[0, len(PROMPT) :].tolist()


def naming(folder: Path, target: Path, generation, config=UNSAID) -> Path:
    """A copy of the model in which the two files have these `eos_token_id`; generation None: there is no such file."""
    shutil.copytree(folder, target)
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        content = {key: own for key, own in json.loads((folder / name).read_text()).items() if key != "eos_token_id"}
        (target / name).write_text(json.dumps(content | ({} if value == UNSAID else {"eos_token_id": value})))
    if generation == "none":
        (target / "generation_config.json").unlink()
    return target


@pytest.mark.parametrize("generation, config", [
    ("9", "4"), ("[9, 4]", "6"), ("[9, 4, 9]", UNSAID), ("none", "9"), ("none", "[4, 9]"), ("none", UNSAID),
    ("none", None), (UNSAID, "9"), (None, "[9, 4]"), (None, None), ("[999, 9]", UNSAID), ("999", "9"), ("-1", UNSAID),
])  # fmt: skip
def test_a_text_ends_where_that_of_transformers_does(bare, free, tmp_path, generation, config):
    """Single digits stand for the likeliest tokens at that place."""
    assert len(set(free[:10])) == 10

    def ids(value):
        if value in (None, "none", UNSAID):
            return value
        read = json.loads(value)
        place = lambda i: free[i] if 0 <= i < 10 else i  # noqa: E731
        return list(map(place, read)) if isinstance(read, list) else place(read)

    folder = naming(bare, tmp_path / "model", ids(generation), ids(config))
    model, given = dtgpt.load(folder), {"temperature": 0, "max_new_tokens": NEW}
    assert model.generate(PROMPT, **given) == theirs(folder)
    assert model.generate(PROMPT, **given, ends=False) == free


def test_ends_of_beams_and_of_texts_of_a_least_length(bare, free, tmp_path):
    folder = naming(bare, tmp_path / "model", [free[9], free[4], free[14]])
    model = dtgpt.load(folder)
    short = theirs(folder, min_new_tokens=7)
    assert model.generate(PROMPT, temperature=0, max_new_tokens=NEW, min_new_tokens=7) == short
    beams = theirs(folder, num_beams=3)
    while beams[-1] == 0:  # the padding
        beams.pop()
    assert model.generate(PROMPT, num_beams=3, max_new_tokens=NEW) == beams


@pytest.mark.parametrize("value", ["2", 2.0, True, [3, None], [[3]], [], list(range(65))])
def test_what_is_not_an_id_is_refused(bare, tmp_path, value):
    folder = naming(bare, tmp_path / "model", value)
    with pytest.raises(UserError, match=r"^generation_config.json of the model has eos_token_id=.*; write the ids"):
        dtgpt.load(folder)
    with pytest.raises(UserError, match=r"^generation_config.json of the model has eos_token_id=.*; write the ids"):
        convert(folder, tmp_path / "kept", ConvertOptions())
    assert not (tmp_path / "kept").exists()


@pytest.fixture
def talking(bare, free, tmp_path) -> Path:
    """A model with a tokenizer, whose end of text is <|im_end|>, and two other ends."""
    folder = naming(bare, tmp_path / "model", [free[9], free[4]])
    write_tokenizer(folder)
    return folder


def test_the_tokenizer_counts_where_the_files_name_no_token_of_the_model(bare, tmp_path):
    end = NAMES.index("<|im_end|>")
    for number, generation in enumerate((UNSAID, None, 999)):
        folder = write_tokenizer(naming(bare, tmp_path / str(number), generation))
        model = dtgpt.load(folder)
        assert model.generate(PROMPT, logit_bias={end: 100}) == [end]
        assert model.special.ends == (end,)


def test_completions_and_chats_of_a_server(talking, free):
    model = dtgpt.load(talking)
    with served(model) as service, client(make_app(service)) as http:
        asked = {"max_tokens": NEW, "temperature": 0, "return_token_ids": True}
        (choice,) = http.post("/v1/completions", json={"prompt": PROMPT, **asked}).json()["choices"]
        assert choice["finish_reason"] == "stop" and choice["token_ids"] == free[:5]
        assert choice["text"] == model.tokenizer.decode([*PROMPT, *free[:4]])[len(model.tokenizer.decode(PROMPT)) :]
        (choice,) = http.post("/v1/completions", json={"prompt": PROMPT, **asked, "ignore_eos": True}).json()["choices"]
        assert choice["finish_reason"] == "length" and choice["token_ids"] == free
        for end in (free[4], free[9], NAMES.index("<|im_end|>")):
            chat = {"messages": [{"role": "user", "content": "Hello"}], "logit_bias": {str(end): 100}, "max_tokens": 9}
            (choice,) = http.post("/v1/chat/completions", json=chat).json()["choices"]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "")


def test_a_run_that_begins_with_the_model_and_what_is_made_of_it(talking, free, recipe, tmp_path, capsys):
    """Samples, answers of reinforcement, the run folder, its exports; and another tokenizer's run."""
    many = list(dict.fromkeys([free[9], *range(40, 98)]))
    naming(talking, tmp_path / "many", many)
    text = write_lines(tmp_path / "in.jsonl", [{"text": "Hello world " * 9}] * 200)
    recipe = replace(recipe, model=replace(open_config(talking), seq_length=32), steps=1)
    recipe = change(recipe, data={"path": str(text), "tokenizer": "auto"}, log={"eval_interval": 0, "sample_tokens": 0})
    begun = override(recipe, ["--init_from", str(tmp_path / "many"), "--model.seq_length", "32"])
    train(begun)
    run = newest_run(recipe)
    answering = replace(begun, grpo=Low(group=8, max_new_tokens=12), global_batch_size=8)
    own = change(replace(answering, init_from=None), data={"tokenizer_file": str(run / "tokenizer.json")})
    for given, resumed in ((answering, None), (own, run)):
        with open_trainer(given, resumed) as trainer:
            assert trainer.ends == tuple(many)
            answers = trainer.objective.rollouts.draw(0)
            ended = [answer for answer in answers if set(answer.ids) & set(many)]
            assert ended and all(not set(answer.ids[:-1]) & set(many) for answer in ended)
    convert(run, tmp_path / "weights", ConvertOptions())
    convert(tmp_path / "weights", tmp_path / "hf", ConvertOptions(to="hf"))
    for model in (run, run / "checkpoints" / "step_00000001", tmp_path / "weights", tmp_path / "hf"):
        assert dtgpt.load(model).special.ends == tuple(many)
    config = transformers.GenerationConfig.from_pretrained(tmp_path / "hf")
    assert config.eos_token_id == many
    other = override(recipe, ["--init_from", str(tmp_path / "many"), "--data.tokenizer", "bytes"])
    with open_trainer(other) as trainer:
        assert trainer.ends == (256,)


def test_a_model_that_has_changed_its_shape_keeps_its_ends(talking, free):
    """Its config.json is written anew."""
    origin, config = read_origin(talking), open_config(talking)
    made = {name: {"eos_token_id": 1, "torch_dtype": "float32"} for name in ("config.json", "generation_config.json")}
    settings = origin.settings(replace(config, num_layers=9), made)
    assert [content["eos_token_id"] for content in settings.values()] == [[free[9], free[4]]] * 2


def test_inspect_names_the_ends_and_the_file(talking, free, tmp_path):
    folder = naming(talking, tmp_path / "more", [free[9], 999])
    name = open_tokenizer(str(folder)).decode([free[9]])
    text = inspect(folder)
    assert f"\n  texts end at {free[9]} {name} (by generation_config.json)\n" in text
    assert text.endswith("\n  not tokens of the model, but named as such: 999")
    assert "(by its tokenizer)" in inspect(naming(talking, tmp_path / "none", None))


@pytest.mark.parametrize("listed", [False, True])
def test_of_two_ends_that_the_tokenizers_files_name_transformers_choice_holds(tmp_path, listed):
    """With `prepare --append-eod`, and in a chat template's names."""
    folder = write_tokenizer(tmp_path / "tokenizer")
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "</s>", "bos_token": "<bos>"}
    if listed:
        settings["added_tokens_decoder"] = {"7": {"content": "</s>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    names = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": "<s>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    chosen = transformers.AutoTokenizer.from_pretrained(folder)
    assert chosen.eos_token == ("</s>" if listed else "<|im_end|>")
    tokenizer = open_tokenizer(str(folder))
    assert tokenizer.end_of_text == chosen.eos_token_id
    assert template_of(tokenizer).tokens["bos_token"] == chosen.bos_token
    text = write_lines(tmp_path / "in.jsonl", [{"text": "Hello"}])
    prepare(PrepareConfig(
        input=text, tokenizer=str(folder), output_prefix=tmp_path / "out", append_eod=True, workers=1
    ))  # fmt: skip
    assert np.fromfile(tmp_path / "out_text_document.bin", np.uint16)[-1] == chosen.eos_token_id

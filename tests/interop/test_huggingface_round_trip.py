"""A folder of transformers makes the round trip through dtgpt, with all that it says besides weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dtgpt.data.library_tokenizers.export import class_note, transformers_files
from dtgpt.data.tokenizers.open import make_tokenizer, open_tokenizer
from dtgpt.interop.convert import ConvertOptions, convert
from dtgpt.interop.hf.model import ARCHITECTURES, HuggingFace
from dtgpt.interop.hf.origin import Origin, read_origin
from dtgpt.interop.marks import ORIGIN
from dtgpt.train.loop import train
from dtgpt.train.start import override
from dtgpt.util.errors import UserError
from tests.support.huggingface_llamas import SIZES, their_model
from tests.support.prepared import write_lines
from tests.support.runs import change, newest_run
from tests.support.vocabularies import cut_by_pattern

transformers = pytest.importorskip("transformers")
CHAT = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
NAMES = ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja")
RUNS = ("hf", "dtgpt", "run", "run of a run")


def read(folder, name):
    text = (folder / name).read_text()
    return json.loads(text) if name.endswith(".json") else text


def edit(folder, name, **values):
    (folder / name).write_text(json.dumps(read(folder, name) | values))


@pytest.fixture
def theirs(tmp_path) -> Path:
    """A Qwen3 for chats: no begin of text, a pad token, two ends of a generated text."""
    folder = tmp_path / "theirs"
    model = their_model("qwen3", vocab_size=500, num_key_value_heads=2, hidden_size=40, max_position_embeddings=4096)
    model.save_pretrained(folder)
    known = open_tokenizer(str(cut_by_pattern(folder, "qwen3")))
    (pad,), (end,) = (known.encode(name, special=True) for name in ("<|endoftext|>", "<|im_end|>"))
    edit(folder, "config.json", eos_token_id=end, pad_token_id=pad, use_cache=False, own_key=[1, {"a": None}])
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [end, pad], "do_sample": True, "temperature": 0.6})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 131072, "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "bos_token": None, "additional_special_tokens": ["<|im_start|>"],
    }))  # fmt: skip
    (folder / "chat_template.jinja").write_text(CHAT)
    return folder


def trained(recipe, path, **changes):
    """A run of one step on samples of 16 tokens, that begins with the model at `path`."""
    config = HuggingFace(path).config if (path / "config.json").is_file() else recipe.model
    text = write_lines(Path(recipe.runs).parent / "raw.jsonl", [{"text": f"the fox number {i}"} for i in range(300)])
    data = {"path": str(text), "tokenizer": "auto"}
    recipe = replace(recipe, model=replace(config, seq_length=16))
    recipe = change(recipe, steps=1, data=data, log={"eval_interval": 0, "sample_tokens": 0}, **changes)
    train(override(recipe, ["--init_from", str(path), "--model.seq_length", "16"]))
    return recipe, newest_run(recipe)


@pytest.mark.parametrize("way", RUNS)
def test_what_a_folder_says_comes_back(recipe, theirs, tmp_path, way, capsys):
    source = theirs
    if way == "dtgpt":
        convert(theirs, source := tmp_path / "ours", ConvertOptions())
    elif way != "hf":
        recipe, source = trained(recipe, theirs)
        if way == "run of a run":
            _, source = trained(recipe, source, name="second")
    capsys.readouterr()
    convert(source, tmp_path / "back", ConvertOptions(to="hf", dtype="bf16"))
    for name in NAMES:
        expected = read(theirs, name)
        if name == "config.json":
            expected |= {key: "bfloat16" for key in ("torch_dtype", "dtype") if key in expected}
        assert read(tmp_path / "back", name) == expected, name
    both = [transformers.AutoTokenizer.from_pretrained(folder) for folder in (theirs, tmp_path / "back")]
    chat = [tokenizer.apply_chat_template([{"content": "the fox"}], tokenize=True) for tokenizer in both]
    assert list(chat[0]) == list(chat[1]) and both[1].bos_token is None and both[1].pad_token == "<|endoftext|>"
    assert HuggingFace(tmp_path / "back").config == HuggingFace(theirs).config


def test_a_run_with_another_tokenizer_has_that_ones_names(recipe, theirs, tmp_path):
    recipe = replace(recipe, model=replace(HuggingFace(theirs).config, seq_length=16))
    data = {"other_tokenizer": True}
    train(change(recipe, steps=1, init_from=str(theirs), log={"sample_tokens": 0}, data=data))
    convert(newest_run(recipe), tmp_path / "back", ConvertOptions(to="hf"))
    config, names = read(tmp_path / "back", "config.json"), read(tmp_path / "back", "tokenizer_config.json")
    assert config["max_position_embeddings"] == names["model_max_length"] == 4096 and config["own_key"]
    assert (config["eos_token_id"], config["pad_token_id"], names["eos_token"]) == (256, None, "<|endoftext|>")
    assert "pad_token" not in names and not (tmp_path / "back" / "chat_template.jinja").exists()


def test_learned_positions_that_were_cut_are_cut_in_the_folder(recipe, tmp_path):
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=64, vocab_size=500)
    )
    model.save_pretrained(tmp_path / "theirs")
    cut_by_pattern(tmp_path / "theirs", "qwen3")
    config = {"eos_token": "<|endoftext|>", "pad_token": "<|im_end|>", "model_max_length": 64}
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps(config))
    _, run = trained(recipe, tmp_path / "theirs")
    convert(run, tmp_path / "back", ConvertOptions(to="hf"))
    assert read(tmp_path / "back", "config.json")["n_positions"] == 16
    names = read(tmp_path / "back", "tokenizer_config.json")
    assert (names["model_max_length"], names["pad_token"]) == (16, "<|im_end|>")
    assert transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "back").config.n_positions == 16


@pytest.mark.parametrize("settings, positions", [
    ({"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}, **SIZES}, 256),
    ({"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 500}, 64)
])  # fmt: skip
def test_a_number_that_follows_from_missing_positions_stays_that_of_the_model(settings, positions):
    architecture = ARCHITECTURES[settings["model_type"]]
    config = replace(architecture.read_config(settings, Path("config.json")), seq_length=positions)
    made = {"config.json": architecture.write_config(config) | {"torch_dtype": "float32"}}
    written = Origin({"config.json": settings}).settings(config, made)["config.json"]
    assert architecture.read_config(written, Path("config.json")) == config


OTHER_CLASS = {  # as folders have it, by which transformers 5 makes a tokenizer of its own for many types of models
    "tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "<|endoftext|>",
    "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]},
}  # fmt: skip


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_an_exported_tokenizer_is_tokenizer_json_for_every_type_of_model(tmp_path, kind):
    (tmp_path / "out").mkdir()
    known = open_tokenizer(str(cut_by_pattern(tmp_path, "qwen3" if kind == "qwen2" else "llama3")))
    files = Origin({"tokenizer_config.json": OTHER_CLASS}).tokenizer_files(transformers_files(known, 64), 64)
    for name, content in (files | {"config.json": {"model_type": kind, "vocab_size": known.vocab_size}}).items():
        (tmp_path / "out" / name).write_text(json.dumps(content))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("Hello 12345 don't  two\n\n x=1;  it'S Grüße", "", " the fox number 7"):
        assert theirs(text, split_special_tokens=True).input_ids == known.encode(text)


def test_a_tokenizer_that_transformers_cuts_as_qwen2_is_told(tmp_path):
    for cut, told in (("qwen3", False), ("llama3", True)):
        known = open_tokenizer(str(cut_by_pattern(tmp_path, cut)))
        content = transformers_files(known, 64)["tokenizer.json"]
        assert (class_note(content, "qwen2") is not None) == told and class_note(content, "qwen3") is None
    content = transformers_files(make_tokenizer("char", ["the fox"], 0), 64)["tokenizer.json"]
    assert class_note(content, "qwen2") is not None


@pytest.mark.parametrize("file", [{"_from_model_config": True, "eos_token_id": 2}, {"eos_token_id": [2, 3]}, None])
@pytest.mark.parametrize("own_tokenizer", [True, False])
def test_generation_config_gains_nothing(own_tokenizer, file):
    settings = SIZES | {"model_type": "llama", "eos_token_id": 2}
    config = ARCHITECTURES["llama"].read_config(settings, Path("config.json"))
    ids = {"bos_token_id": 7, "eos_token_id": 9}
    made = {"config.json": ids | {"torch_dtype": "float32"}, "generation_config.json": ids | {"max_length": 64}}
    files = {"config.json": settings} | ({} if file is None else {"generation_config.json": file})
    written = Origin(files, own_tokenizer=own_tokenizer).settings(config, made)
    expected = file if file is None or own_tokenizer else file | {"eos_token_id": 9}
    assert written.get("generation_config.json") == expected
    assert written["config.json"] == settings | ({} if own_tokenizer else ids)


@pytest.mark.parametrize("given, expected", [(["--seq_length", "8"], 64), (["--model.seq_length", "4096"], 4096)])
def test_positions_are_the_folders_unless_asked_otherwise(recipe, tmp_path, given, expected):
    their_model("qwen3", vocab_size=257, max_position_embeddings=64).save_pretrained(tmp_path / "theirs")
    model = replace(HuggingFace(tmp_path / "theirs").config, seq_length=4096)
    settled = override(replace(recipe, model=model), [*given, "--init_from", str(tmp_path / "theirs")])
    assert (settled.model.seq_length, settled.sample_length) == (expected, int(given[1]))


def test_a_tokenizer_without_a_begin_gets_none(tmp_path, theirs):
    (theirs / "tokenizer_config.json").unlink()
    convert(theirs, tmp_path / "back", ConvertOptions(to="hf"))
    assert "bos_token" not in read(tmp_path / "back", "tokenizer_config.json")


def test_a_run_keeps_the_positions_of_the_run_that_it_began_with(recipe, tmp_path):
    their_model("qwen3", vocab_size=257).save_pretrained(tmp_path / "theirs")
    model = replace(HuggingFace(tmp_path / "theirs").config, seq_length=32)
    first = change(replace(recipe, model=model), steps=1, log={"sample_tokens": 0})
    train(first)
    second = change(first, name="second", init_from=str(newest_run(first)), model={"seq_length": 16})
    train(second)
    convert(newest_run(second), tmp_path / "back", ConvertOptions(to="hf"))
    assert read(tmp_path / "back", "config.json")["max_position_embeddings"] == 32
    assert read(tmp_path / "back", "tokenizer_config.json")["model_max_length"] == 32


@pytest.mark.parametrize("content", ["[]", "{", '{"files": 3}', '{"x": 1}'])
def test_a_damaged_copy_is_told(theirs, tmp_path, content):
    convert(theirs, tmp_path / "ours", ConvertOptions())
    (tmp_path / "ours" / ORIGIN).write_text(content)
    with pytest.raises(UserError, match=ORIGIN) as told:
        read_origin(tmp_path / "ours")
    assert "\n" not in str(told.value)

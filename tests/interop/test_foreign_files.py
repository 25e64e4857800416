"""Paths that hold no model, or where what should be a small regular file is something else: one sentence, at once."""

import json
import os
import signal
import struct
from contextlib import contextmanager

import pytest
import torch

import dtgpt
from dtgpt.checkpoint.manifest import Checkpoint
from dtgpt.checkpoint.open import open_source
from dtgpt.checkpoint.shard_file import Damaged
from dtgpt.config.sections import DataConfig
from dtgpt.data.dataset import load_dataset
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.interop.hf.model import save_huggingface
from dtgpt.interop.inspect import inspect
from dtgpt.interop.weights_alone import save_weights
from dtgpt.util.errors import UserError
from tests.commands.test_cli import in_process
from tests.interop.test_interop_foreign import checkpoint, llmc_file
from tests.support.bodies_checkpoint import change_state
from tests.support.megatron_trees import CONFIG, InMemory, make_weights, write_tree
from tests.support.sources import Reference, refused

pytestmark = pytest.mark.slow(3)


@contextmanager
def at_once():
    """Fail instead of waiting for ever."""

    def fail(*_):
        raise AssertionError("it waits or reads for ever")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def weights():
    return make_weights()


@pytest.fixture
def models(tmp_path, weights):
    """A function: the name of a format -> the path of a model in it."""
    source = InMemory(CONFIG, weights)

    def sharded(path):
        save_huggingface(source, path)
        (path / "model.safetensors").rename(path / "a.safetensors")
        names = [f"transformer.h.{i}.ln_1.weight" for i in range(3)]
        (path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")})
        )

    makers = {
        "ours": lambda path: save_weights(source, path, "a test"),
        "hf": lambda path: save_huggingface(source, path),
        "sharded": sharded,
        "megatron": lambda path: write_tree(path, weights),
        "nanogpt.pt": lambda path: torch.save(checkpoint(), path),
        "llmc.bin": lambda path: path.write_bytes(llmc_file(Reference())),
    }

    def make(name):
        makers[name](tmp_path / name)
        return tmp_path / name

    return make


FILES = [
    ("ours", "state.json"), ("ours", "weights-00000-000.safetensors"), ("hf", "config.json"),
    ("hf", "model.safetensors"), ("sharded", "model.safetensors.index.json"), ("sharded", "a.safetensors"),
    ("megatron", "latest_checkpointed_iteration.txt"), ("megatron", "iter_0000030/mp_rank_00/model_optim_rng.pt"),
    ("nanogpt.pt", ""), ("llmc.bin", ""),
]  # fmt: skip


def sparse(path):
    path.touch()
    os.truncate(path, 1 << 40)


KINDS = {
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": os.mkdir,
    "huge": sparse,
    "link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "file"), FILES)
def test_what_is_no_small_regular_file_is_a_sentence(models, tmp_path, capsys, name, file, kind):
    path = models(name)
    place = path / file if file else path
    place.unlink()
    KINDS[kind](place)
    commands = [["convert", path, tmp_path / "out"]]
    if (name, kind) != ("llmc.bin", "huge"):  # which could be token files
        commands.append(["inspect", path])
    for command in commands:
        with at_once():
            code, out, err = in_process(command, capsys)
        assert code == 2 and out == "" and err.count("\n") == 1 and str(path) in err, err


def test_headers_that_claim_absurd_sizes(models):
    for name, file in (("ours", "weights-00000-000.safetensors"), ("hf", "model.safetensors")):
        path = models(name)
        for claimed in (1 << 63, 1 << 40, 99_000_000, 1 << 20):
            (path / file).write_bytes(struct.pack("<Q", claimed) + b'{"a":' + b"[" * 1000)
            with pytest.raises(UserError) as caught:
                open_source(path)
            assert str(path) in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("size", [1 << 40, 10**30, -1, True, "4"])
def test_sizes_in_the_header_of_an_own_file_are_checked(models, size):
    path = models("ours")
    file = path / "weights-00000-000.safetensors"
    where = {"x": {"shape": [size], "offset": [0]}}
    entry = {"dtype": "F32", "shape": [size], "data_offsets": [0, 16]}
    table = json.dumps({"__metadata__": {"dtgpt.pieces": json.dumps(where)}, "x": entry}).encode()
    file.write_bytes(struct.pack("<Q", len(table)) + table + bytes(16))
    from dtgpt.checkpoint.shard_file import read_header

    with pytest.raises(Damaged):
        read_header(file)


def test_a_path_that_does_not_exist_is_called_that(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in (
        ["inspect", "nothing"],
        ["generate", "nothing"],
        ["convert", "nothing", "out"],
        ["inspect", "no/x.pt"],
    ):
        code, out, err = in_process(words, capsys)
        assert code == 2 and out == "" and err.count("\n") == 1 and f"{words[1]} does not exist; give " in err, err
    for action in (
        lambda: dtgpt.load("nothing"),
        lambda: open_source(tmp_path / "nothing"),
    ):
        refused(action, "nothing does not exist")
    (tmp_path / "link").symlink_to("gone")
    refused(lambda: open_source(tmp_path / "link"), "link leads to gone, which does not exist")
    (tmp_path / "there").mkdir()
    refused(lambda: open_source(tmp_path / "there"), "holds no model")
    assert not (tmp_path / "out").exists()


WRONG = [
    *({"num_layers": value} for value in (True, 4.0, "4", None, [4], 10**4000, -4)),
    *({"layer_norm_eps": value} for value in ("a", True, None, 0, -1e-5, 1.0, [1e-5], 10**400)),
    *({"dropout": value} for value in ("0", None, 1, -0.1)),
    *({"init_std": value} for value in ("a", None, -1.0)),
    {"vocab_size": "131"}, {"seq_length": {}}, {"hidden_size": 32.0}, {"num_heads": False}, {"new": 1},
]  # fmt: skip


@pytest.mark.parametrize("change", WRONG, ids=lambda change: str(change)[:30])
def test_every_field_of_a_stored_model_has_its_type(models, change):
    path = models("ours")
    state = json.loads((path / "state.json").read_text())
    change_state(path, {"model": state["model"] | change})
    with pytest.raises(Damaged) as caught:
        Checkpoint(path)
    assert len(str(caught.value)) < 600 and next(iter(change)) in str(caught.value)


@pytest.mark.parametrize("change", [
    {"plan": 3}, {"world": "two"}, {"world": True}, {"origin": ["x"]}, {"recipe": []}, {"versions": {"torch": {}}},
    {"versions": None}, {"step": True}, {"updates": 0.0}, {"tokens": "5"}, {"data_digest": None},
    {"files": {"weights-00000-000.safetensors": {"bytes": "64", "sha256": "0"}}},
    {"files": {"weights-00000-000.safetensors": {"bytes": 64, "sha256": None}}}, {"files": []}
], ids=str)  # fmt: skip
def test_what_a_state_tells_has_its_type(models, change):
    path = models("ours")
    change_state(path, change)
    with pytest.raises(Damaged):
        Checkpoint(path)


def test_a_checkpoint_as_it_was_written_has_these_types(models):
    path = models("ours")
    change_state(path, {"plan": "dp2", "world": 2, "recipe": {}})
    assert "written by the plan dp2 on 2 processes" in inspect(path)


def test_long_words_of_a_command_line_are_shortened(tmp_path, capsys):
    (tmp_path / "there").mkdir()
    for words in (
        ["generate", tmp_path / "there", "--tokens", "9" * 100_000],
        ["generate", tmp_path / "there", "--tokens", "x" * 100_000],
        ["convert", tmp_path / "there", tmp_path / "out", "--to", "x" * 100_000],
        ["x" * 100_000],
        ["inspect", "x" * 100_000],
    ):
        code, out, err = in_process(words, capsys)
        assert code == 2 and out == "" and err.count("\n") == 1 and len(err) < 1000, err[:2000]


def test_foreign_configurations_have_these_types_too(models):
    path = models("hf") / "config.json"
    settings = json.loads(path.read_text())
    for name, value in (("n_layer", True), ("n_head", 4.0), ("layer_norm_epsilon", True), ("vocab_size", "131")):
        path.write_text(json.dumps(settings | {name: value}))
        refused(lambda: open_source(path.parent), str(path), name)
    path.write_text(json.dumps(settings | {"model_type": "x" * 10**6, "n_inner": [[1] * 10**5] * 10}))
    with pytest.raises(UserError) as caught:
        open_source(path.parent)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["tokenizer.json", "spm.model", "vocab.json", "merges.txt", "of a run"])
def test_a_fifo_is_no_tokenizer(tmp_path, name):
    fifo = tmp_path / name
    os.mkfifo(fifo)
    (tmp_path / "whole.json").write_text("{}")
    with at_once(), pytest.raises(UserError, match="cannot be read: not a regular file"):
        if name == "merges.txt":
            open_tokenizer(vocab_file=str(tmp_path / "whole.json"), merge_file=str(fifo))
        elif name == "vocab.json":
            open_tokenizer(vocab_file=str(fifo), merge_file=str(tmp_path / "whole.json"))
        elif name == "of a run":
            load_dataset(DataConfig(tokenizer="gpt2", vocab_file=str(fifo), merge_file=str(fifo)), tmp_path)
        else:
            open_tokenizer(str(fifo))

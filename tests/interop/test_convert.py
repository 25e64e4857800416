"""`dtgpt convert`, and what begins from its checkpoints of weights."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dtgpt.interop.weights_alone
from dtgpt.checkpoint.load import Saved
from dtgpt.checkpoint.manifest import Checkpoint, step_folder
from dtgpt.checkpoint.open import open_source
from dtgpt.interop.megatron.model import Megatron
from dtgpt.models.gpt2 import TABLE
from dtgpt.models.source import parameter_shapes
from dtgpt.train.loop import train
from dtgpt.train.setup import open_trainer
from dtgpt.util.errors import UserError
from dtgpt.util.storage import FileLock
from tests.commands.test_cli import in_process
from tests.support.bodies_inference import weights_at_the_start
from tests.support.megatron_llama_trees import scaled_tree
from tests.support.megatron_trees import make_weights, write_tree
from tests.support.ranks import pool
from tests.support.runs import change, losses, newest_run, training
from tests.support.sources import refused

pytestmark = pytest.mark.slow(8)


@pytest.fixture
def recipe(recipe):
    return change(recipe, steps=2, log={"sample_tokens": 0, "eval_samples": 1})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return tmp_path_factory.mktemp("trained")


@pytest.fixture
def run(recipe, trained):
    """A copy of the run that the first test trains."""
    if not any(trained.iterdir()):
        train(replace(recipe, runs=str(trained)))
    whole = newest_run(replace(recipe, runs=str(trained)))
    return shutil.copytree(whole, Path(recipe.runs) / whole.name, symlinks=True)


@pytest.fixture
def convert(capsys):
    """What `dtgpt convert` says of success, and its warnings."""

    def command(*words):
        capsys.readouterr()
        code, out, err = in_process(["convert", *words], capsys)
        assert code == 0, err
        return out, err

    return command


def weights_of(path, **options):
    """Every parameter, the token table without its padding."""
    source = open_source(path, **options)
    size = source.config.vocab_size
    return {n: source.read(n)[: size if n == TABLE else None] for n in parameter_shapes(source.config)}


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[n].view(torch.int32), theirs[n].view(torch.int32)) for n in ours)


def files_in(folder: Path):
    """Every path below it, hidden ones too, with the content of files."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def test_a_link_to_a_checkpoint_has_the_tokenizer_of_its_run(run, tmp_path, convert):
    (tmp_path / "link").symlink_to(step_folder(run / "checkpoints", 2))
    convert(tmp_path / "link", tmp_path / "hf", "--to", "hf")
    assert (tmp_path / "hf" / "tokenizer.json").is_file()


def test_round_trips_through_all_formats_are_bitwise(run, convert, tmp_path):
    hf, megatron, ours, again = (tmp_path / name for name in ("hf", "deep/megatron", "deep/er/ours", "again"))
    out, err = convert(run, hf, "--to", "hf")
    assert re.fullmatch(rf"{hf}: [0-9]+,[0-9]+ parameters, fp32\n", out) and err == ""
    sizes = "--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2"
    convert(hf, megatron, "--to", "megatron", *sizes)
    assert sorted(p.name for p in (megatron / "release").iterdir()) == [
        f"mp_rank_0{t}_00{p}" for t in "01" for p in "01"
    ]
    convert(megatron, ours, "--true-vocab-size", "257")
    convert(ours, again, "--to=hf")
    expected = weights_of(run)
    assert len({w.flatten()[0].item() for w in expected.values()}) > 10
    for path, options in ((hf, {}), (megatron, {"true_vocab_size": 257}), (ours, {}), (again, {})):
        assert same(expected, weights_of(path, **options)), path
    assert (hf / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert sorted(p.name for p in tmp_path.rglob(".*")) == []


def test_what_the_checkpoint_knows_of_the_training_goes_to_megatron(run, convert, tmp_path):
    convert(run / "checkpoints" / "step_00000002", tmp_path / "tree", "--to", "megatron")
    source = Megatron(tmp_path / "tree")
    assert (source.iteration, source._ranks[0, 0, 0].args.consumed_train_samples) == (2, 16)
    convert(tmp_path / "tree", tmp_path / "cut", "--to", "megatron", "--target-tensor-parallel-size", "2")
    again = Megatron(tmp_path / "cut")
    assert (again.iteration, again.consumed_samples, again.tensor_parallel_size) == (2, 16, 2)
    convert(run, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "release", "--to", "megatron")
    assert (tmp_path / "release" / "latest_checkpointed_iteration.txt").read_text() == "release"


@pytest.mark.parametrize("word, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_are_written_in_the_dtype_that_was_asked_for(run, convert, tmp_path, word, dtype):
    convert(run, tmp_path / "hf", "--to", "hf", "--dtype", word)
    assert {t.dtype for t in load_file(tmp_path / "hf" / "model.safetensors").values()} == {dtype}
    convert(run, tmp_path / "tree", "--to", "megatron", "--dtype", word)
    expected = {n: w.to(dtype).float() for n, w in weights_of(run).items()}
    assert same(expected, weights_of(tmp_path / "hf"))
    assert same(expected, weights_of(tmp_path / "tree", true_vocab_size=257))


def test_a_checkpoint_of_weights_is_whole_and_says_where_they_came_from(run, convert, tmp_path):
    convert(run, tmp_path / "ours")
    checkpoint = Checkpoint(tmp_path / "ours")
    assert checkpoint.problem() is None and not checkpoint.has_optimizer
    assert (checkpoint.state["step"], checkpoint.state["origin"]) == (0, str(run))
    assert [p.name for p in (tmp_path / "ours").iterdir() if "optimizer" in p.name] == []


def test_a_large_model_is_written_in_files_of_a_limited_size(run, convert, tmp_path, monkeypatch):
    monkeypatch.setattr(dtgpt.interop.weights_alone, "FILE_LIMIT", 20_000)
    convert(run, tmp_path / "ours")
    assert len(list((tmp_path / "ours").glob("weights-00000-*.safetensors"))) > 3
    assert same(weights_of(run), weights_of(tmp_path / "ours")) and Checkpoint(tmp_path / "ours").problem() is None


@pytest.mark.parametrize("to", [["--to", "hf"], []])
def test_notes_of_a_source_are_warnings(tmp_path, convert, to):
    tree = scaled_tree(tmp_path / "tree")
    out, err = convert(tree, tmp_path / "out", *to)
    assert err.startswith("warning: ") and err.count("\n") == 1 and "rope_scaling_factor=4" in err
    assert "warning" not in out


WRONG = {
    "nothing": ([], ["MODEL TARGET"]),
    "no target": (["RUN"], ["MODEL TARGET"]),
    "an option for the target": (["RUN", "--to", "hf"], ["MODEL TARGET"]),
    "three paths": (["RUN", "out", "more"], ["'more' is not an option", "MODEL TARGET only"]),
    "an unknown source": (["here/nothing", "out"], ["here/nothing does not exist"]),
    "a folder of something else": (["here", "out"], ["here holds no model"]),
    "an unknown format": (["RUN", "out", "--to", "onnx"], ["onnx", "hf, megatron"]),
    "an unknown option": (["RUN", "out", "--tp", "2"], ["--tp"]),
    "an option without its value": (["RUN", "out", "--to"], ["--to needs a value"]),
    "an unknown dtype": (["RUN", "out", "--to", "hf", "--dtype", "int8"], ["int8", "bf16"]),
    "fp16 for dtgpt": (["RUN", "out", "--dtype", "fp16"], ["dtype=fp16", "leave --dtype out"]),
    "bf16 for dtgpt": (["RUN", "out", "--to", "dtgpt", "--dtype=bf16"], ["dtype=bf16", "leave --dtype out"]),
    "tp for hf": (["RUN", "out", "--to", "hf", "--target-tensor-parallel-size", "2"], ["tensor_parallel_size=2"]),
    "pp for dtgpt": (["RUN", "out", "--target-pipeline-parallel-size", "2"], ["pipeline_parallel_size=2"]),
    "no tp rank": (["RUN", "out", "--to", "megatron", "--target-tensor-parallel-size", "0"], ["size=0", "1 or more"]),
    "no pp rank": (["RUN", "out", "--to", "hf", "--target-pipeline-parallel-size", "-1"], ["size=-1", "1 or more"]),
    "heads": (
        ["RUN", "out", "--to", "megatron", "--target-tensor-parallel-size", "4"],
        ["num_heads=2", "size=1 or 2"],
    ),
    "layers": (["RUN", "out", "--to", "megatron", "--target-pipeline-parallel-size", "4"], ["num_layers=2"]),
    "a vocabulary for a run": (["RUN", "out", "--to", "hf", "--true-vocab-size", "200"], ["true_vocab_size=200"]),
    "a vocabulary beyond": (["TREE", "out", "--true-vocab-size", "500"], ["true_vocab_size=500", "1 to 256"]),
    "a file in the way": (["RUN", "here/notes.txt/out"], ["notes.txt"]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_use_is_one_sentence_and_writes_nothing(run, tmp_path, monkeypatch, capsys, wrong):
    write_tree(tmp_path / "tree", make_weights())
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "notes.txt").write_text("no model")
    monkeypatch.chdir(tmp_path)
    before = files_in(tmp_path)
    capsys.readouterr()
    words, expected = WRONG[wrong]
    places = {"RUN": run, "TREE": "tree"}
    code, out, err = in_process(["convert", *(places.get(w, w) for w in words)], capsys)
    assert code == 2 and out == ""
    assert err.startswith("dtgpt: ") and err.count("\n") == 1 and all(word in err for word in expected), err
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("to", ["dtgpt", "hf", "megatron"])
@pytest.mark.parametrize("kind", ["file", "folder", "empty folder", "link", "the source itself"])
def test_a_target_that_exists_is_left_alone(run, tmp_path, capsys, to, kind):
    target = run if kind == "the source itself" else tmp_path / "target"
    if kind == "file":
        target.write_text("mine")
    elif "folder" in kind:
        target.mkdir()
        if kind == "folder":
            (target / "mine.txt").write_text("mine")
    elif kind == "link":
        target.symlink_to(tmp_path / "nowhere")
    before = files_in(tmp_path)
    capsys.readouterr()
    code, out, err = in_process(["convert", run, target, "--to", to], capsys)
    assert code == 2 and out == "" and err.count("\n") == 1 and str(target) in err, err
    assert files_in(tmp_path) == before and target.is_symlink() == (kind == "link")


@pytest.mark.parametrize("to", ["dtgpt", "hf", "megatron"])
def test_a_damaged_checkpoint_is_not_converted(run, tmp_path, capsys, to):
    (file,) = (run / "checkpoints" / "step_00000002").glob("weights*")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    before = files_in(tmp_path)
    capsys.readouterr()
    code, out, err = in_process(["convert", run, tmp_path / "out", "--to", to], capsys)
    assert code == 2 and out == "" and err.count("\n") == 1 and f"{file} is damaged" in err
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("failure, code", [(OSError(28, "No space left on device"), 2), (KeyboardInterrupt(), 130)])
def test_a_conversion_that_fails_half_way_leaves_nothing(run, tmp_path, monkeypatch, capsys, failure, code):
    write, there = dtgpt.interop.weights_alone.write_file, []

    def third_fails(path, pieces, data):
        if len(there) == 2:
            there.extend(path.parent.iterdir())
            raise failure
        there.append(path)
        return write(path, pieces, data)

    monkeypatch.setattr(dtgpt.interop.weights_alone, "FILE_LIMIT", 20_000)
    monkeypatch.setattr(dtgpt.interop.weights_alone, "write_file", third_fails)
    before = files_in(tmp_path)
    capsys.readouterr()
    stopped, out, err = in_process(["convert", run, tmp_path / "out"], capsys)
    assert stopped == code and out == "" and len(there) == 4
    assert code != 2 or (err.count("\n") == 1 and "free space" in err)
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("to", ["dtgpt", "hf", "megatron"])
def test_what_a_killed_conversion_left_is_in_nobodys_way(run, convert, tmp_path, to):
    left, others = tmp_path / ".out.0123abcd.new", tmp_path / ".out-2.0123abcd.new"
    for folder in (left, others):
        folder.mkdir()
        (folder / "weights-00000-000.safetensors").write_text("half")
    convert(run, tmp_path / "out", "--to", to)
    vocabulary = {"true_vocab_size": 257} if to == "megatron" else {}
    assert same(weights_of(run), weights_of(tmp_path / "out", **vocabulary)) and others.exists()
    assert not left.exists() and not (tmp_path / ".out.lock").exists()


def test_two_conversions_do_not_write_one_folder(run, tmp_path, capsys):
    (tmp_path / ".out.0123abcd.new").mkdir()  # of the first
    before = files_in(tmp_path)
    with FileLock(tmp_path / ".out.lock", remove=True):
        stopped, _, err = in_process(["convert", run, tmp_path / "out", "--to", "hf"], capsys)
    assert stopped == 2 and err.count("\n") == 1
    assert f"{tmp_path / 'out'} is being written by another process (pid {os.getpid()} on" in err
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("kind", ["dtgpt", "hf", "run", "checkpoint"])
def test_a_run_begins_with_the_weights_that_it_was_given(recipe, run, convert, tmp_path, kind):
    path = {"run": run, "checkpoint": run / "checkpoints" / "step_00000002"}.get(kind, tmp_path / kind)
    if not path.exists():
        convert(run, path, "--to", kind)
    expected = weights_of(run)
    with open_trainer(change(recipe, init_from=str(path), seed=7)) as begun:
        found = {s.name: s.local[: 257 if s.name == TABLE else None] for s in begun.shards}
        assert same(expected, found) and begun.step == 0
        assert not any(m.any() for s in begun.shards for m in begun.optimizer.rule.state(s.index).values())
    fresh = {s.name: s.local[: 257 if s.name == TABLE else None] for s in training(recipe).shards}
    assert not any(torch.equal(fresh[n], expected[n]) for n in fresh)


def test_a_run_of_another_plan_begins_with_the_same_weights(recipe, run, convert, tmp_path):
    convert(run, tmp_path / "ours")
    target = change(recipe, init_from=str(tmp_path / "ours"), plan="tp2", seed=7, micro_batch_size=4)
    whole = pool().run(2, weights_at_the_start, target)[0]
    source = Saved(Checkpoint(tmp_path / "ours"))
    for name, tensor in whole.items():
        moment = name.endswith((".exp_avg", ".exp_avg_sq"))
        assert not tensor.any() if moment else torch.equal(tensor, source.read(name)), name


def test_a_run_trains_on_from_converted_weights(recipe, run, convert, tmp_path):
    convert(run, tmp_path / "hf", "--to", "hf")
    constant = {"lr": 3e-3, "warmup": 0, "schedule": "constant"}
    train(change(recipe, steps=30, optimizer=constant, init_from=str(run)))
    trained = newest_run(recipe)
    convert(trained, tmp_path / "trained", "--to", "hf")
    train(change(recipe, steps=1, init_from=str(tmp_path / "trained"), name="on"))
    (on,) = Path(recipe.runs).glob("on-*")
    assert losses(on)[1] < losses(trained)[1] - 0.5 and list(losses(on)) == [1]


def test_weights_of_another_shape_are_refused(recipe, run, convert, tmp_path):
    convert(run, tmp_path / "ours")
    wider = change(recipe, model={"hidden_size": 64}, init_from=str(tmp_path / "ours"))
    refused(lambda: train(wider), str(tmp_path / "ours"), "hidden_size 32 there, 64 here")


@pytest.mark.parametrize("place", ["beside", "in the run"])
def test_a_checkpoint_of_weights_cannot_be_resumed_but_begun_from(recipe, run, convert, tmp_path, place):
    target = tmp_path / "ours" if place == "beside" else step_folder(run / "checkpoints", 9)
    convert(run / "checkpoints" / "step_00000002", target)
    before = files_in(run / "checkpoints")
    with pytest.raises(UserError) as error:
        train(change(recipe, steps=20, resume=str(target)))
    assert f"--init_from {target}" in str(error.value) and "\n" not in str(error.value)
    assert files_in(run / "checkpoints") == before and list(Path(recipe.runs).iterdir()) == [run]


def test_the_state_of_a_checkpoint_of_weights_is_json_that_names_no_plan(run, convert, tmp_path):
    convert(run, tmp_path / "ours")
    state = json.loads((tmp_path / "ours" / "state.json").read_text())
    assert state["consumed_samples"] == state["updates"] == 0 and not {"plan", "recipe"} & state.keys()

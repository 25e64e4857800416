"""`dtgpt inspect`: what it says of each kind of model is what is there."""

import hashlib
import json
import re

import pytest
import torch

from dtgpt.checkpoint.open import open_source
from dtgpt.interop.hf.model import save_huggingface
from dtgpt.interop.inspect import inspect as inspect_path
from dtgpt.interop.weights_alone import save_weights
from dtgpt.models.decoder import unique_parameters
from dtgpt.train.loop import train
from dtgpt.util.errors import UserError
from tests.commands.test_cli import in_process
from tests.interop.test_interop_huggingface import InMemory
from tests.support.bodies_checkpoint import change_state
from tests.support.megatron_llama_trees import scaled_tree
from tests.support.ranks import pool
from tests.support.runs import change, newest_run
from tests.support.sources import load_model

SHAPE = "num_layers 2, hidden_size 32, num_heads 2, seq_length 16, vocab_size 257"


@pytest.fixture
def recipe(recipe):
    """Of a run with checkpoints of steps 1 and 2."""
    return change(recipe, steps=2, log={"sample_tokens": 0, "eval_samples": 1}, checkpoint={"interval": 1})


@pytest.fixture
def run(recipe):
    train(recipe)
    return newest_run(recipe)


@pytest.fixture
def command(capsys):
    """`dtgpt` with these words: exit code, what was said, and what was said of errors."""

    def call(*words):
        capsys.readouterr()
        return in_process(words, capsys)

    return call


@pytest.fixture
def inspect(command):
    """The text of a model, which is not changed by looking at it."""

    def call(path, *options):
        before = {p: p.stat().st_mtime_ns for p in path.rglob("*")}
        code, out, err = command("inspect", path, *options)
        assert code == 0 and err == "", err
        assert {p: p.stat().st_mtime_ns for p in path.rglob("*")} == before
        return out

    return call


def newest(run):
    return run / "checkpoints" / "step_00000002"


def digests(text):
    """Of parameters, by name, as --tensors on shows them."""
    found = re.findall(r"^  ([0-9a-f]{64})  ([\w.]+) \[[\d, ]+\]$", text, re.MULTILINE)
    return {name: digest for digest, name in found}


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_run_is_its_checkpoints_and_the_newest_of_them_in_full(run, inspect):
    text = inspect(run)
    lines = text.splitlines()
    assert lines[0] == f"run {run}: 2 checkpoints"
    sizes = [sum(f.stat().st_size for f in c.glob("*.safetensors")) / 2**20 for c in (newest(run), newest(run))]
    for line, step, size in zip(lines[1:3], (1, 2), sizes, strict=True):
        assert line == f"  step_0000000{step}: {size:.1f} MiB, every file verified"
    assert "\n".join(lines[3:]) + "\n" == inspect(newest(run))


@pytest.mark.slow(2)
@pytest.mark.parametrize("plan", ["single", "tp2"])
def test_a_checkpoint_says_step_plan_sizes_and_the_digest_of_every_file(recipe, inspect, plan):
    target = change(recipe, plan=plan)
    train(target) if plan == "single" else pool().run(2, train, target)
    folder = newest(newest_run(recipe))
    text = inspect(folder)
    parameters = open_source(folder).config.num_parameters
    for words in (
        f"checkpoint {folder}: ",
        "step 2, 16 samples, 256 tokens seen",
        f"by the plan {plan} on {'2 processes' if plan == 'tp2' else '1 process'}\n",
        f"  {parameters:,} parameters: {SHAPE}",
        "table of 384 rows",
        "weights and optimizer, dtgpt ",
        "  every file verified\n",
    ):
        assert words in text, words
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == (4 if plan == "tp2" else 2)
    for file in files:
        content = file.read_bytes()
        assert f"  {hashlib.sha256(content).hexdigest()}  {file.name}  {len(content):,} bytes\n" in text
    assert text.count(".safetensors") == len(files) and digests(text) == {}
    assert "loss scale" not in text and "weights of" not in text


def test_a_checkpoint_of_weights_says_where_they_came_from(run, command, inspect, tmp_path):
    command("convert", run, tmp_path / "ours")
    text = inspect(tmp_path / "ours")
    for words in ("step 0, 0 samples, 0 tokens seen", f"weights of {run}\n", "weights alone, ", SHAPE):
        assert words in text, words
    assert "plan" not in text and "optimizer" not in text


def test_a_run_in_fp16_says_its_loss_scale(recipe, inspect):
    scaled = {"initial": 1024.0, "window": 2}
    train(change(recipe, precision="fp16", loss_scale=scaled))
    assert "  loss scale 2048, 0 skipped steps\n" in inspect(newest_run(recipe))


def test_a_hugging_face_folder(run, command, inspect, tmp_path):
    command("convert", run, tmp_path / "hf", "--to", "hf")
    lines = inspect(tmp_path / "hf").splitlines()
    assert lines[0] == f"HuggingFace model {tmp_path / 'hf'}" and SHAPE in lines[1]
    assert f"{open_source(run).config.num_parameters:,} parameters" in lines[1] and len(lines) == 3
    assert lines[2] == "  texts end at 256 <|endoftext|> (by generation_config.json)"


def test_a_megatron_tree_and_what_is_to_be_known_of_it(tmp_path, inspect):
    tree = scaled_tree(tmp_path / "tree")
    lines = inspect(tree).splitlines()
    assert lines[0] == f"Megatron model {tree}" and "num_layers 4" in lines[1] and "vocab_size 256" in lines[1]
    assert "rope_scaling_factor=4" in lines[2] and len(lines) == 3


@pytest.mark.parametrize("kind", ["weights", "optimizer"])
def test_a_damaged_file_is_named(run, inspect, kind):
    (file,) = newest(run).glob(f"{kind}*")
    flip(file)
    text = inspect(run)
    assert "step_00000001: " in text and text.count("every file verified") == 2
    assert text.count(f"{file} is damaged") == 1
    assert "step 1, 8 samples" in text  # the one before is told in full
    file.unlink()
    with pytest.raises(UserError, match=f"{file} is damaged .No such file"):
        inspect_path(newest(run))


def test_an_older_checkpoint_that_is_damaged_is_named(run, inspect):
    (run / "checkpoints" / "step_00000001" / "state.json").write_text("{}")
    text = inspect(run)
    assert f"step_00000001: {run}/checkpoints/step_00000001/state.json is damaged" in text
    assert "step 2, 16 samples" in text and "every file verified" in text


@pytest.mark.parametrize("how", ["changed", "gone"])
def test_a_run_whose_newest_checkpoint_cannot_be_opened_is_told_with_the_one_before(run, inspect, how):
    state = newest(run) / "state.json"
    flip(state) if how == "changed" else state.unlink()
    text = inspect(run)
    assert f"step_00000002: {state} is damaged" in text
    assert "step 1, 8 samples" in text and "  every file verified\n" in text


def test_a_checkpoint_that_cannot_be_opened_is_one_sentence(run, command):
    flip(newest(run) / "state.json")
    code, out, err = command("inspect", newest(run))
    assert code == 2 and out == "" and err.count("\n") == 1 and f"{newest(run) / 'state.json'} is damaged" in err


def test_digests_tell_the_values_of_every_parameter(run, inspect, tmp_path):
    source, found = open_source(run), digests(inspect(run, "--tensors", "on"))
    assert len(found) == 2 * 12 + 4
    for name in ("blocks.1.mlp.fc.weight", "embedding.wpe.weight", "head.ln_f.bias"):
        assert found[name] == hashlib.sha256(source.read(name).numpy().tobytes()).hexdigest()
    before = digests(inspect(run / "checkpoints" / "step_00000001", "--tensors=on"))
    assert all(before[name] != found[name] for name in found)


@pytest.mark.slow(2)
def test_digests_are_the_same_whatever_plan_wrote_the_weights(recipe, command, inspect, run, tmp_path):
    """A run of tp2 begins with the weights of another, and leaves them as they are."""
    frozen = {"lr": 1e-30, "weight_decay": 0.0, "warmup": 0, "schedule": "constant"}
    pool().run(2, train, change(recipe, plan="tp2", name="zut", init_from=str(run), optimizer=frozen))
    cut = newest_run(recipe)
    assert cut.name == "zut-001" and len(list(newest(cut).glob("weights*"))) == 2
    expected = digests(inspect(run, "--tensors", "on"))
    assert digests(inspect(cut, "--tensors", "on")) == expected and len(expected) == 28


def test_digests_are_the_same_after_conversions(run, command, inspect, tmp_path):
    expected = digests(inspect(run, "--tensors", "on"))
    ours, hf, tree, again = (tmp_path / name for name in ("ours", "hf", "tree", "again"))
    command("convert", run, ours)
    command("convert", run, hf, "--to", "hf")
    command("convert", hf, tree, "--to", "megatron", "--target-tensor-parallel-size", "2")
    command("convert", tree, again, "--true-vocab-size", "257")
    for path in (ours, hf, again):
        found = digests(inspect(path, "--tensors", "on"))
        assert {n for n in expected if found[n] != expected[n]} == set(), path


def test_tensors_that_are_not_finite_are_named(run, command, inspect, tmp_path):
    """In each format, by inspect and by convert; rows of padding do not count."""
    source = open_source(run)
    model = load_model(source, torch.device("cpu"))
    clean = tmp_path / "clean"
    save_huggingface(source, clean)
    assert "NaN" not in inspect(clean)
    parameters = unique_parameters(model)
    names = list(parameters)
    with torch.no_grad():
        parameters[source.config.table_name][source.config.vocab_size :] = torch.nan
    save_weights(InMemory(model), tmp_path / "padded", "a test")
    assert "NaN" not in inspect(tmp_path / "padded")
    with torch.no_grad():
        parameters[names[2]][0], parameters[names[4]][0] = torch.nan, -torch.inf
    broken = tmp_path / "broken"
    save_weights(InMemory(model), broken, "a test")
    found = f"NaN or infinite values in 2 tensors: {names[2]}, {names[4]}"
    assert found in inspect(broken) and found in inspect(broken, "--tensors")
    for to in ("hf", "megatron", "dtgpt"):
        code, _, err = command("convert", broken, tmp_path / to, "--to", to)
        assert code == 0 and f"warning: {broken} has {found}: so has" in err
        assert found in inspect(tmp_path / to)


def test_a_run_without_a_checkpoint_is_one_sentence(recipe, run, command):
    for folder in (run / "checkpoints").glob("step_*"):
        folder.rename(folder.with_name(f"aside-{folder.name}"))
    code, out, err = command("inspect", run)
    assert code == 2 and out == "" and err.count("\n") == 1 and f"{run} has no checkpoint yet" in err


@pytest.mark.parametrize("words, expected", [
    (["nothing"], ["nothing does not exist"]), ([], ["needs MODEL"]),
    (["--tensors", "on"], ["needs one MODEL or PREFIX"]), (["nothing", "--tensors", "all"], ["all", "on, off"])
])  # fmt: skip
def test_wrong_use_is_one_sentence(tmp_path, monkeypatch, command, words, expected):
    monkeypatch.chdir(tmp_path)
    code, out, err = command("inspect", *words)
    assert code == 2 and out == "" and err.count("\n") == 1 and all(word in err for word in expected), err


def test_names_in_a_state_are_not_trusted(run, command, tmp_path):
    (tmp_path / "secret").write_text("secret")
    state = json.loads((newest(run) / "state.json").read_text())
    change_state(newest(run), {"files": state["files"] | {"../../../secret": {"bytes": 6, "sha256": "0" * 64}}})
    code, out, err = command("inspect", newest(run))
    assert code == 2 and out == "" and "../../../secret" in err and err.count("\n") == 1

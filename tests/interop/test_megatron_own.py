"""Checkpoints that Megatron-LM's own code wrote, with the logits of its own model."""

import enum
import sys
import types
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import dtgpt
from dtgpt.checkpoint.load import load_weights
from dtgpt.checkpoint.open import open_source
from dtgpt.data.library_tokenizers.unpickler import StandIn
from dtgpt.interop.megatron.export import save_megatron
from dtgpt.interop.megatron.model import Megatron
from dtgpt.interop.pickles import open_pickle
from dtgpt.parallel.shards import Shards
from dtgpt.util.errors import UserError
from tests.commands.test_cli import in_process
from tests.support.archives import unpack
from tests.support.megatron_trees import check, make_weights, write_tree
from tests.support.sources import load_model

DATA = Path(__file__).parents[1] / "fixtures" / "megatron"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("own")
    unpack(DATA / "gpt2_pp2.tar.xz", root)
    return root / "gpt2_pp2"


def distance(path, tree, logits=None):
    """Largest difference from the logits of Megatron-LM's model."""
    tokens, expected = torch.load(tree / "expected.pt")
    with torch.no_grad():
        found = (logits or load_model(open_source(path), torch.device("cpu")))(tokens)
    assert expected.std() > 0.1
    return (found - expected).abs().max().item()


def test_logits_are_those_of_megatrons_model(tree):
    source = Megatron(tree)
    assert source.iteration == 3 and source.notes == []
    assert distance(tree, tree) < 1e-5


def test_every_command_takes_the_tree(tree, tmp_path, capsys):
    code, out, err = in_process(["inspect", tree], capsys)
    assert (code, err) == (0, "") and "num_layers 4, hidden_size 64" in out
    formats = {"hf": ["--to", "hf"], "ours": [], "tp4_pp1": ["--to", "megatron", "--target-tensor-parallel-size", "2"]}
    for name, options in formats.items():
        code, _, err = in_process(["convert", tree, tmp_path / name, *options], capsys)
        assert (code, err) == (0, "")
        assert distance(tmp_path / name, tree) < 1e-5, name
    assert distance(tree, tree, dtgpt.load(tree)) < 1e-5
    code, _, err = in_process(["generate", tree], capsys)
    assert code == 2 and "tokens are not GPT-2's" in err


def test_what_megatrons_code_wrote_is_written_again_bitwise(tree, tmp_path):
    """With mcore's names; those of 2023 are checked in test_megatron_export."""
    save_megatron(Megatron(tree), tmp_path / "out", 1, 2, iteration=3, family="local")
    for path in tree.rglob("model_optim_rng.pt"):
        ours = open_pickle(tmp_path / "out" / path.relative_to(tree))["model"]
        theirs = open_pickle(path)["model"]
        assert ours.keys() == theirs.keys()
        assert all(
            ours[key] is None if value is None else torch.equal(ours[key], value) for key, value in theirs.items()
        )


def test_a_run_begins_with_the_weights_of_the_tree(tree):
    """What --init_from does when the model is laid out."""
    model = dtgpt.load(tree)
    shards = Shards(model.stages, model.mesh, masters=False)
    for shard in shards:
        shard.local.zero_()
    shards.publish()
    assert distance(tree, tree, model) > 0.1
    load_weights(open_source(tree, model.mesh), shards)
    assert distance(tree, tree, model) < 1e-5


@pytest.mark.parametrize("zipped", [True, False])
def test_classes_of_the_next_release_are_opened_inert(tmp_path, monkeypatch, zipped):
    """Whatever their module, also one whose name looks like another's, and args of an own class."""
    modules = ["megatron", "megatron.core", "megatron.core.next_release", "torch_next", "sys_next"]
    for name in modules:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))

    def define(module, name, *bases, **members):
        made = enum.Enum(name, members, module=module) if not bases else type(name, bases, {"__module__": module})
        setattr(sys.modules[module], name, made)
        return made

    scope = define("megatron.core.next_release", "GraphScope", attn=1, moe=2)
    options = define("torch_next", "Options", Namespace)
    table = define("sys_next", "Table", dict)

    def save(content, path):
        content["args"].cuda_graph_scope = [scope.attn, scope.moe]
        content["args"].kind = scope
        content["args"] = options(**vars(content["args"]))
        content["state"] = table(a=scope.attn)
        torch.save(content, path, _use_new_zipfile_serialization=zipped)

    weights = make_weights()
    write_tree(tmp_path, weights, 2, 2, save=save)
    for name in modules:
        monkeypatch.delitem(sys.modules, name)
    check(Megatron(tmp_path, true_vocab_size=131), weights)
    content = open_pickle(next(tmp_path.rglob("mp_rank_01_001/*.pt")))
    assert content["args"].foreign == "torch_next.Options" and isinstance(content["state"], StandIn)
    assert content["args"].state["cuda_graph_scope"][0].args in ((1,), (content["args"].state["kind"], "attn"))
    assert not any(name in sys.modules for name in modules)


@pytest.mark.parametrize(("changes", "words"), [
    ({"softmax_type": "off-by-one"}, "another softmax .softmax_type=off-by-one"),
    ({"qk_l2_norm": True}, "queries and keys .qk_l2_norm=True"), ({"use_mup": True}, "muP"),
    ({"activation_func_clamp_value": 7.0}, "clamped"), ({"is_hybrid_model": True}, "is_hybrid_model=True")
])  # fmt: skip
def test_what_no_tensor_shows_is_refused_by_args(tmp_path, changes, words):
    """Such a model has the names and shapes of a GPT-2, and would compute something else."""
    write_tree(tmp_path, make_weights(), **changes)
    with pytest.raises(UserError, match=words):
        Megatron(tmp_path)


@pytest.mark.parametrize("name", ["apply_layernorm_1p", "layernorm_zero_centered_gamma"])
def test_weights_around_zero_under_both_names_of_the_argument(tmp_path, name):
    weights = make_weights()
    norms = {n for n in weights if ".ln_" in n and n.endswith("weight")}
    around_zero = {n: t - 1 if n in norms else t for n, t in weights.items()}
    source = Megatron(write_tree(tmp_path, around_zero, **{name: True}), true_vocab_size=131)
    check(source, {n: t + 1 if n in norms else t for n, t in around_zero.items()})


@pytest.mark.parametrize("family", ["local", "mcore"])
@pytest.mark.parametrize("rank", [0, 1])
def test_another_table_in_place_of_the_tied_copy_is_told(tmp_path, family, rank):
    def save(content, path):
        copy = content["model"].get("output_layer.weight", content["model"].get("word_embeddings_for_head"))
        if copy is not None and f"mp_rank_0{rank}" in str(path):
            (copy["weight"] if family == "local" else copy).add_(1)
        torch.save(content, path)

    tied = {"untie_embeddings_and_output_weights": False}
    assert Megatron(write_tree(tmp_path / "a", make_weights(), 2, 2, family=family, **tied), 131).notes == []
    (told,) = Megatron(write_tree(tmp_path / "b", make_weights(), 2, 2, family=family, save=save, **tied), 131).notes
    assert f"mp_rank_0{rank}_001" in told and "copy of the token table that differs" in told


def test_modules_and_tensors_of_any_type_in_a_file_of_the_old_format(tmp_path):
    """There a module's class has a persistent id, and every storage lies in the file whatever its type."""
    extra = [torch.nn.Linear(2, 2), torch.ones(3, dtype=torch.complex64), torch.nn.Sequential(torch.nn.GELU())]

    def save(content, path):
        content["args"].extra = content["before"] = extra
        torch.save(content, path, _use_new_zipfile_serialization=False)

    weights = make_weights()
    check(Megatron(write_tree(tmp_path, weights, 2, 2, save=save), true_vocab_size=131), weights)

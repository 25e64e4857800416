"""What the import of Megatron-LM's checkpoints refuses, and foreign pickles."""

import enum
import os
import shutil
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from dtgpt.data.library_tokenizers.unpickler import StandIn
from dtgpt.interop.megatron.export import save_megatron
from dtgpt.interop.megatron.model import Megatron
from dtgpt.interop.pickles import open_pickle
from dtgpt.models.source import parameter_shapes
from dtgpt.util.errors import UserError
from tests.support.megatron_trees import CONFIG, H, InMemory, check, make_weights, write_tree


@pytest.fixture(scope="module")
def weights():
    return make_weights()


@pytest.fixture
def foreign_modules():
    """Modules that are there when a file is written and gone when it is read, as Megatron-LM is."""
    made = {}
    for name in ("megatron.core.transformer.enums", "megatron.core.rerun_state_machine", "fp16.loss_scaler"):
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
    sys.modules.update(made)

    def define(module, name, base=object, **members):
        made_class = enum.Enum(name, members, module=module) if base is enum.Enum else type(name, (base,), {})
        made_class.__module__ = module
        setattr(sys.modules[module], name, made_class)
        return made_class

    yield define
    for name in made:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("zipped", [True, False])
def test_foreign_enums_random_states_and_optimizers_are_opened_inert(tmp_path, weights, foreign_modules, zipped):
    backend = foreign_modules("megatron.core.transformer.enums", "AttnBackend", enum.Enum, flash=1, auto=5)
    mode = foreign_modules("megatron.core.rerun_state_machine", "RerunMode", enum.Enum, disabled="disabled")
    scaler = foreign_modules("fp16.loss_scaler", "DynamicLossScaler")()
    scaler.cur_scale = 2.0

    def save(content, path):
        content["args"].attention_backend = backend.auto
        content["rerun_state_machine"] = {"mode": mode.disabled}
        content["optimizer"] = {"loss_scaler": scaler, "state": {0: {"exp_avg": torch.ones(3)}}, "lr": np.float64(0.5)}
        state = np.random.RandomState(0).get_state()
        content["rng_state"] = [{"np_rng_state": state, "torch_rng_state": torch.get_rng_state()}]
        torch.save(content, path, _use_new_zipfile_serialization=zipped)

    write_tree(tmp_path, weights, 2, save=save)
    for name in ("megatron.core.transformer.enums", "megatron.core.rerun_state_machine", "fp16.loss_scaler"):
        del sys.modules[name]
    check(Megatron(tmp_path, true_vocab_size=131), weights)
    content = open_pickle(next(tmp_path.rglob("mp_rank_01/*.pt")))
    assert isinstance(content["args"].attention_backend, StandIn)
    assert content["args"].attention_backend.foreign.startswith(
        ("megatron.core", "builtins.getattr", "__builtin__.getattr")
    )
    assert content["optimizer"]["loss_scaler"].state == {"cur_scale": 2.0}
    assert isinstance(content["rng_state"][0]["np_rng_state"][1], StandIn)


class Hostile:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("function", [Path.touch, os.mkdir, eval, shutil.rmtree, os.system])
def test_a_file_that_could_run_code_runs_nothing(tmp_path, weights, function, zipped):
    mark = tmp_path / "ran"
    argument = {eval: f"__import__('pathlib').Path({str(mark)!r}).touch()", Path.touch: mark}.get(function, str(mark))
    if function is shutil.rmtree:
        mark.mkdir()

    def save(content, path):
        content["optimizer"] = Hostile(function, argument)
        torch.save(content, path, _use_new_zipfile_serialization=zipped)

    check(Megatron(write_tree(tmp_path / "tree", weights, save=save), true_vocab_size=131), weights)
    assert mark.exists() == (function is shutil.rmtree)
    found = open_pickle(next(tmp_path.rglob("*.pt")))["optimizer"]
    assert isinstance(found, StandIn) and found.foreign.endswith((function.__name__, "getattr"))


def test_names_reach_nothing_real(tmp_path):
    path = tmp_path / "x.pt"
    numpy_scalar = np.core.multiarray.scalar if np.__version__ < "2" else np._core.multiarray.scalar
    made = [Hostile(getattr, torch.Size(), "__class__"), Hostile(numpy_scalar, np.dtype("O"), b"x" * 8)]
    torch.save({"a": [*made, Hostile(Calling, "x")]}, path)
    first, second, third = open_pickle(path)["a"]
    assert isinstance(first, StandIn) and first.args == (torch.Size(), "__class__")
    assert isinstance(second, StandIn) and isinstance(second.args[0], StandIn)
    assert third.foreign == f"{__name__}.Calling" and third.args == ("x",)


class Calling:
    def __init__(self, argument):
        raise AssertionError("it ran")


def test_missing_ranks_are_named(tmp_path, weights):
    for missing in ("mp_rank_01_001", "mp_rank_00_000", "mp_rank_01_000"):
        root = write_tree(tmp_path / missing, weights, 2, 2)
        shutil.rmtree(root / "iter_0000030" / missing)
        with pytest.raises(UserError, match=f"{missing}/model_optim_rng.pt is missing"):
            Megatron(root)
    for tp, pp, gone, named in (
        (2, 1, "mp_rank_01", "mp_rank_01/"),
        (1, 2, "mp_rank_00_001", "mp_rank_00_001/"),
    ):
        root = write_tree(tmp_path / f"{tp}{pp}", weights, tp, pp)
        shutil.rmtree(root / "iter_0000030" / gone)
        with pytest.raises(UserError, match=named + "model_optim_rng.pt is missing, as .* is one of 2"):
            Megatron(root)
    root = write_tree(tmp_path / "file", weights, 2)
    (root / "iter_0000030/mp_rank_01/model_optim_rng.pt").unlink()
    with pytest.raises(UserError, match=r"mp_rank_01/model_optim_rng.pt is missing"):
        Megatron(root)


@pytest.mark.parametrize("zipped", [True, False])
def test_truncated_and_foreign_files_are_named(tmp_path, weights, zipped):
    def save(content, path):
        torch.save(content, path, _use_new_zipfile_serialization=zipped)

    path = write_tree(tmp_path, weights, 2, save=save) / "iter_0000030/mp_rank_01/model_optim_rng.pt"
    whole = path.read_bytes()
    for size in (len(whole) - 100, len(whole) // 2, 100, 3, 0):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"mp_rank_01/model_optim_rng.pt cannot be read"):
            Megatron(tmp_path)
    for content, words in (
        ([1, 2], r"holds \[1, 2\], not"),
        ({"iteration": 3}, "holds no model"),
        ({"model": torch.ones(3)}, "has a Tensor in its model"),
        ({"model": {"x": torch.ones(3)}}, "has x, which GPT-2 does not have"),
        ({"model": {}, "checkpoint_version": 4.0}, "checkpoint_version=4.0"),
        ({"model": {}, "checkpoint_version": [1]}, r"checkpoint_version=\[1\]"),
        ({"model": {"decoder.final_layernorm.bias": torch.ones(3, dtype=torch.int8)}}, "int8"),
    ):
        save(content, path)
        with pytest.raises(UserError, match=f"mp_rank_01/model_optim_rng.pt .*{words}"):
            Megatron(tmp_path)


@pytest.mark.parametrize(("changes", "words"), [
    ({"swiglu": True}, "swiglu=True"), ({"position_embedding_type": "rope"}, "position_embedding_type=rope"),
    ({"use_rotary_position_embeddings": True}, "use_rotary_position_embeddings=True"),
    ({"add_position_embedding": False}, "add_position_embedding=False"),
    ({"normalization": "RMSNorm"}, "normalization=RMSNorm"),
    ({"group_query_attention": True, "num_query_groups": 2}, "num_query_groups=2"),
    ({"untie_embeddings_and_output_weights": True}, "untie_embeddings_and_output_weights=True"),
    ({"add_bias_linear": False}, "add_bias_linear=False"), ({"ffn_hidden_size": 96}, "ffn_hidden_size=96"),
    ({"num_experts": 8}, "num_experts=8"), ({"num_experts": [2]}, "num_experts"),
    ({"num_layers": 5}, "num_layers=5, but the checkpoint's tensors have 4"), ({"hidden_size": 64}, "hidden_size=64"),
    ({"padded_vocab_size": 128}, "padded_vocab_size=128"), ({"num_attention_heads": "4"}, "num_attention_heads='4'"),
    ({"num_attention_heads": 5}, "num_heads=5"), ({"layernorm_epsilon": "x"}, "epsilon")
])  # fmt: skip
def test_a_model_that_is_not_gpt2_is_refused(tmp_path, weights, changes, words):
    write_tree(tmp_path, weights, **changes)
    with pytest.raises(UserError, match=words):
        Megatron(tmp_path)


def test_an_untied_output_layer_is_refused_without_args_too(tmp_path, weights):
    def save(content, path):
        content["model"]["language_model"]["output_layer"] = {"weight": torch.ones(256, H)}
        torch.save(content, path)

    write_tree(tmp_path, weights, save=save)
    with pytest.raises(UserError, match=r"output layer of its own \(output_layer\.weight\)"):
        Megatron(tmp_path)


def edit(path, change):
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def test_files_that_do_not_belong_together_are_refused(tmp_path, weights):
    key = "layers.1.mlp.dense_h_to_4h.bias"

    def encoder(content):
        return content["model"]["language_model"]["encoder"]

    for number, (change, words) in enumerate(
        [
            (lambda c: setattr(c["args"], "hidden_size", 64), "hidden_size=64"),
            (lambda c: c.update(iteration=31), "iteration=31"),
            (lambda c: c.update(checkpoint_version=2.0), "checkpoint_version=2"),
            (lambda c: encoder(c).pop(key), "has no tensor blocks.1.mlp.fc.bias"),
            (lambda c: encoder(c).update({key: torch.ones(128)}), "blocks.1.mlp.fc.bias of shape"),
            (lambda c: encoder(c).update({"layers.2.mlp.dense_h_to_4h.bias": torch.ones(64)}), "holds blocks.2"),
            (lambda c: c.update(model0=c.pop("model"), model1={}), "chunks=2"),
        ]
    ):
        root = write_tree(tmp_path / str(number), weights, 2, 2)
        edit(root / "iter_0000030/mp_rank_01_001/model_optim_rng.pt", change)
        with pytest.raises(UserError, match=f"mp_rank_01_001/model_optim_rng.pt .*{words}"):
            Megatron(root)
    root = write_tree(tmp_path / "first", weights, 2, 2)
    edit(root / "iter_0000030/mp_rank_00_001/model_optim_rng.pt", lambda c: encoder(c).pop("layers.0." + key[9:]))
    with pytest.raises(UserError, match=r"mp_rank_00_001/model_optim_rng.pt has no tensor blocks.0.mlp.fc.bias"):
        Megatron(root)


def ranked(root, weights, tp=2, pp=1, rank=lambda t, p, tp: t + p * tp):
    """A tree whose files say which process wrote them; returns them by rank."""
    write_tree(root, weights, tp, pp)
    found = {}
    for t in range(tp):
        for p in range(pp):
            folder = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
            found[t, p] = root / "iter_0000030" / folder / "model_optim_rng.pt"
            if rank is not None:
                edit(found[t, p], lambda c, t=t, p=p: setattr(c["args"], "rank", rank(t, p, tp)))
    return found


def told(root):
    with pytest.raises(UserError) as error:
        Megatron(root)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("says", [None, lambda t, p, tp: 0, lambda t, p, tp: t + p * tp], ids=["no", "0", "its"])
@pytest.mark.parametrize("tp, pp", [(2, 1), (1, 2), (2, 2)])
def test_one_ranks_file_twice_is_refused(tmp_path, weights, tp, pp, says):
    files = list(ranked(tmp_path / "tree", weights, tp, pp, says).values())
    Megatron(tmp_path / "tree")
    for one, other in ((files[0], files[-1]), (files[-1], files[0])):
        kept = other.read_bytes()
        shutil.copy(one, other)
        said = told(tmp_path / "tree")
        assert "hold the same tensors; copy the file of each rank" in said, said
        other.write_bytes(kept)
    Megatron(tmp_path / "tree")


@pytest.mark.parametrize("tp, pp", [(2, 1), (1, 2), (4, 2)])
def test_files_that_changed_places_or_were_saved_twice_are_refused(tmp_path, weights, tp, pp):
    files = list(ranked(tmp_path / "tree", weights, tp, pp, lambda t, p, tp: t + 16 * p).values())
    Megatron(tmp_path / "tree")
    for one, other in ((files[0], files[1]), (files[1], files[0])):
        kept = one.read_bytes(), other.read_bytes()
        edit(one, lambda c: c.update(extra=1))
        other.write_bytes(one.read_bytes())
        edit(other, lambda c: c.update(extra=2))  # the same rank's, but not the same bytes
        assert "hold the same tensors; copy the file of each rank" in told(tmp_path / "tree")
        one.write_bytes(kept[1])
        other.write_bytes(kept[0])
        assert "was written by rank" in told(tmp_path / "tree")
        one.write_bytes(kept[0])
        other.write_bytes(kept[1])
    Megatron(tmp_path / "tree")


def test_dtgpts_own_trees_say_which_rank_wrote_a_file(tmp_path, weights):
    save_megatron(InMemory(CONFIG, weights), tmp_path / "tree", 2, 2)
    files = sorted(tmp_path.rglob("*.pt"))
    assert [open_pickle(file)["args"].rank for file in files] == [0, 2, 1, 3]
    check(Megatron(tmp_path / "tree", true_vocab_size=131), weights)


def test_a_bit_that_flips_within_a_tensor_is_told(tmp_path, weights):
    write_tree(tmp_path, weights, 2)
    file = next(tmp_path.rglob("mp_rank_00/*.pt"))
    whole = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        storages = [e for e in archive.infolist() if "/data/" in e.filename]
    names = list(parameter_shapes(CONFIG))
    for number, entry in enumerate(storages):
        damaged = bytearray(whole)
        first = entry.header_offset + 30 + sum(whole[entry.header_offset + i] for i in (26, 28))
        first += 256 * whole[entry.header_offset + 29]
        damaged[first + number * 97 % entry.file_size] ^= 1 << number % 8
        file.write_bytes(damaged)
        with pytest.raises(
            UserError, match=r"mp_rank_00/model_optim_rng\.pt is damaged: a tensor of .*; copy"
        ) as error:
            source = Megatron(tmp_path, true_vocab_size=131)
            for name in names:
                source.read(name)
        assert "\n" not in str(error.value)
    file.write_bytes(whole)
    check(Megatron(tmp_path, true_vocab_size=131), weights)


def test_folders_that_are_no_checkpoint_are_refused(tmp_path, weights):
    tracker = "latest_checkpointed_iteration.txt"
    (tmp_path / "dist" / "iter_0000005").mkdir(parents=True)
    (tmp_path / "dist" / "iter_0000005" / "__0_0.distcp").write_bytes(b"")
    (tmp_path / "dist" / tracker).write_text("5")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / tracker).write_text("../../etc")
    (tmp_path / "empty").mkdir()
    for name, words in [
        ("none", "is not a folder"),
        ("empty", "has no mp_rank_"),
        ("odd", "neither an iteration nor release"),
        ("dist", r"has no \.metadata, which says"),
    ]:
        with pytest.raises(UserError, match=words):
            Megatron(tmp_path / name)
    for vocab in (0, 257):
        with pytest.raises(UserError, match=f"true_vocab_size={vocab} .* use 1 to 256"):
            Megatron(write_tree(tmp_path / str(vocab), weights, 2), true_vocab_size=vocab)
    folder = write_tree(tmp_path / "both", weights, 1) / "iter_0000030"
    shutil.copytree(folder / "mp_rank_00", folder / "mp_rank_00_000")
    with pytest.raises(UserError, match="are of the same rank"):
        Megatron(folder)
    shutil.move(folder / "mp_rank_00_000", folder / "mp_rank_01")
    with pytest.raises(UserError, match=r"has 2 ranks where .* says 1"):
        Megatron(folder)

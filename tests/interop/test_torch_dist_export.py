"""Models written in Megatron-LM's format torch_dist: read back by dtgpt, by torch and by Megatron-Core."""

import importlib.util
import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dtgpt.checkpoint.open import open_source
from dtgpt.interop.distcp import DistributedFolder
from dtgpt.interop.megatron.export_dist import save_torch_dist
from dtgpt.interop.pickles import open_pickle
from dtgpt.util.errors import UserError
from tests.commands.test_cli import in_process
from tests.support import megatron_llama_trees, megatron_mixture_trees, megatron_trees
from tests.support.archives import unpack
from tests.support.disks import files_of_at_most
from tests.support.megatron_trees import InMemory, check
from tests.support.sources import load_model

DATA = Path(__file__).parents[1] / "fixtures" / "megatron"
PROGRAM = Path(__file__).parents[1] / "support" / "megatron_core.py"
LLAMA = megatron_llama_trees.CONFIG
QWEN3 = replace(LLAMA, qk_norm=True, tied=True)
MODELS = {
    "gpt2": (megatron_trees.CONFIG, megatron_trees.make_weights()),
    "llama": (LLAMA, megatron_llama_trees.make_weights()),
    "qwen3": (QWEN3, megatron_llama_trees.make_weights(QWEN3)),
    **{name: (c, megatron_mixture_trees.make_weights(c)) for name, c in megatron_mixture_trees.CONFIGS.items()},
}


def written(root, model, *args, **options):
    config, weights = MODELS[model]
    save_torch_dist(InMemory(config, weights), root, *args, **options)
    return root


@pytest.mark.slow(2)
@pytest.mark.parametrize("model", MODELS)
def test_what_is_written_is_read_back_bitwise(model, tmp_path):
    config, weights = MODELS[model]
    source = open_source(written(tmp_path / "a", model), true_vocab_size=config.vocab_size)
    check(source, weights, config)
    assert (source.iteration, source.notes, source.path.name) == (0, [], "release")
    narrow = written(tmp_path / "b" / "c", model, 4 // (1 + (model != "gpt2")), torch.bfloat16, 12, 77, family="local")
    source = open_source(narrow, true_vocab_size=config.vocab_size)
    correction = ".correction."  # of a router, which stays in fp32
    expected = {n: t if correction in n else t.bfloat16().float() for n, t in weights.items()}
    check(source, expected, config)
    assert (source.iteration, source.consumed_samples, source.path.name) == (12, 77, "iter_0000012")
    assert source.num_rows == 512 // (1 + (model != "gpt2"))
    assert [p.name for p in narrow.parent.iterdir()] == ["c"]
    qkv = next(key for key in source.folder.tensors if "linear_qkv.weight" in key)
    assert source.folder.tensors[qkv].dtype == torch.bfloat16


def test_plain_torch_opens_the_folder(tmp_path):
    weights = MODELS["mixtral"][1]
    folder = written(tmp_path / "dist", "mixtral") / "release"
    assert json.loads((folder / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
        "common_backend_version": 1,
    }  # fmt: skip
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    ours = weights["blocks.2.mlp.experts.gate_up.weight"]
    stack = found["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert stack.shape == (4, 4, 48, 32) and torch.equal(stack[2][:, :24], ours[:, 0::2])
    assert torch.equal(found["decoder.layers.pre_mlp_layernorm.weight"][3], weights["blocks.3.norm_2.weight"])
    key = "decoder.layers.self_attention.linear_qkv.weight"
    state = {key: torch.empty_like(found[key])}
    load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    assert torch.equal(state[key][1], weights["blocks.1.attn.qkv.weight"])
    with torch.serialization.safe_globals([Namespace]):
        common = torch.load(folder / "common.pt", weights_only=True)
    assert common["args"].no_save_optim and common["args"].no_save_rng and common["iteration"] == 0


@pytest.mark.parametrize("name", ["llama_tp2", "gpt2_dp2"])
def test_what_megatron_wrote_is_written_again(name, tmp_path):
    """Tensors by name, shape, type and bits, each object that its modules ask for, and the args that both have."""
    unpack(DATA / f"torch_dist_{name}.tar.xz", tmp_path)
    tree = next((tmp_path / f"torch_dist_{name}").glob("iter_*"))
    theirs, source = DistributedFolder(tree), open_source(tree)
    dtype = theirs.tensors["embedding.word_embeddings.weight"].dtype
    for family in ("local", "transformer_engine"):
        place = tmp_path / family
        save_torch_dist(source, place, 1, dtype, 3, source.consumed_samples, family)
        ours = DistributedFolder(place / "iter_0000003")
        plain = {key: t for key, t in theirs.tensors.items() if not key.startswith("optimizer.")}
        assert ours.tensors.keys() == plain.keys()
        for key, stored in plain.items():
            shape = ours.tensors[key].shape
            if "word_embeddings" in key or "output_layer" in key:
                assert shape == (128, *stored.shape[1:])
            else:
                assert shape == stored.shape, key
            whole = tuple(map(range, stored.shape))
            assert ours.tensors[key].dtype == stored.dtype and torch.equal(
                ours.read(key, whole), theirs.read(key, whole)
            )
        states = {name for name in theirs.objects if "_extra_state" in name}
        assert states == ours.objects.keys() if family == "local" else states < ours.objects.keys()
        assert ours.read_object(min(states)) == theirs.read_object(min(states)) == [None]
    given = vars(theirs.read_object("common_state/shard_0_1")[0]["args"])
    made = vars(open_pickle(place / "iter_0000003" / "common.pt")["args"])
    known = (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "kv_channels",
        "normalization",
        "swiglu",
        "add_bias_linear",
    )
    assert {name: made[name] for name in known} == {name: given[name] for name in known}


def test_the_commands(tmp_path, capsys):
    config, weights = MODELS["llama"]
    tree = written(tmp_path / "dist", "llama", iteration=5)
    words = ["--to", "megatron", "--ckpt-format", "torch_dist", "--true-vocab-size", "131"]
    code, _, err = in_process(["convert", tree, tmp_path / "two", *words, "--target-tensor-parallel-size", "2"], capsys)
    assert (code, err) == (0, "")
    check(open_source(tmp_path / "two", true_vocab_size=131), weights, config)
    refused = {
        ("--target-pipeline-parallel-size", "2"): "target_pipeline_parallel_size=2 applies to ckpt_format=torch only",
        ("--target-expert-parallel-size", "2"): "target_expert_parallel_size=2 applies to ckpt_format=torch only",
        ("--target-tensor-parallel-size", "3"): "cannot be split over tensor_parallel_size=3",
    }
    for more, message in refused.items():
        code, _, err = in_process(["convert", tree, tmp_path / "no", *words, *more], capsys)
        assert code == 2 and message in err and len(err.splitlines()) == 1
    code, _, err = in_process(["convert", tree, tmp_path / "no", "--to", "hf", "--ckpt-format", "torch_dist"], capsys)
    assert code == 2 and "ckpt_format=torch_dist applies to --to megatron only" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist", "two"]


def test_a_full_disk_and_a_weight_beyond_the_range_leave_nothing(tmp_path):
    config, weights = MODELS["gpt2"]
    for size in (200, 5_000, 100_000):
        with files_of_at_most(size), pytest.raises(UserError, match=r"out cannot be written"):
            written(tmp_path / "out", "gpt2")
        assert not list(tmp_path.iterdir())
    large = {**weights, "blocks.2.mlp.fc.bias": torch.full((128,), 7e4)}
    with pytest.raises(UserError, match=r"blocks.2.mlp.fc.bias has weights beyond the range"):
        save_torch_dist(InMemory(config, large), tmp_path / "out", dtype=torch.float16)
    assert not list(tmp_path.iterdir())


def test_one_piece_is_in_memory_at_a_time(tmp_path):
    config, weights = MODELS["mixtral"]
    read = []

    class Watched(InMemory):
        def read(self, name, part=None):
            found = super().read(name, part)
            read.append(found.numel())
            return found

    save_torch_dist(Watched(config, weights), tmp_path / "out")
    matrix = 2 * config.expert_size * config.hidden_size  # of one expert
    table = config.vocab_size * config.hidden_size
    assert max(read) == table and sorted(set(read))[-2] <= max(matrix, config.hidden_size * 128)
    assert sum(read) == sum(w.numel() for w in weights.values()) - 2 * (256 - 131) * config.hidden_size


MCORE = os.environ.get("DTGPT_MEGATRON_CORE", sys.executable)  # a Python with megatron-core


@pytest.mark.slow(60)
@pytest.mark.skipif(
    sys.executable == MCORE and importlib.util.find_spec("megatron") is None, reason="needs megatron-core"
)
@pytest.mark.parametrize(("model", "tp", "pp", "ep"), [
    ("gpt2", 1, 1, 1), ("gpt2", 2, 1, 1), ("llama", 1, 2, 1), ("qwen3", 2, 1, 1), ("mixtral", 1, 1, 2),
    ("qwen2_moe", 2, 1, 1), ("qwen3_moe", 1, 1, 2), ("glm4_moe", 1, 1, 1),
])  # fmt: skip
def test_megatron_core_loads_it_and_computes_the_same(model, tp, pp, ep, tmp_path):
    """Its dist_checkpointing into its GPTModel, over ranks on gloo."""
    config, _ = MODELS[model]
    tree = written(tmp_path / "dist", model, family="local") / "release"
    tokens = torch.randint(0, config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    torch.save(tokens, tmp_path / "tokens.pt")
    with torch.no_grad():
        ours = load_model(open_source(tree, true_vocab_size=config.vocab_size), torch.device("cpu"))(tokens)
    world = tp * pp * ep
    ranks = [
        subprocess.Popen(
            [MCORE, PROGRAM, tree, tmp_path, str(tp), str(pp), str(ep), str(config.vocab_size)],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world), "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    said = [rank.communicate(timeout=400)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, said[0][-3000:]
    found = torch.load(tmp_path / "logits.pt")[..., : config.vocab_size]
    assert ours.std() > 0.1 and (found - ours[..., : config.vocab_size]).abs().max() < 1e-5

"""Megatron-LM's format torch_dist: weights of every layout, and files that are damaged or hostile."""

import io
import os
import pickle
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtgpt.checkpoint.open import open_source
from dtgpt.interop.distcp import DistributedFolder
from dtgpt.models.source import parameter_shapes
from dtgpt.util.errors import UserError
from tests.commands.test_cli import in_process
from tests.support import megatron_llama_trees, megatron_trees
from tests.support.archives import unpack
from tests.support.megatron_trees import check
from tests.support.torch_dist import args_of, common_of, keys_of, write

DATA = Path(__file__).parents[1] / "fixtures" / "megatron"
LLAMA, GPT2 = megatron_llama_trees.CONFIG, megatron_trees.CONFIG
MODELS = {
    "gpt2": (GPT2, megatron_trees.make_weights()),
    "llama": (LLAMA, megatron_llama_trees.make_weights()),
    "qwen3": (
        replace(LLAMA, qk_norm=True, tied=True),
        megatron_llama_trees.make_weights(replace(LLAMA, qk_norm=True, tied=True)),
    ),
}


def plain_tree(root, model, dtype=torch.float32, as_file=False, stacked=True, family="transformer_engine", **changes):
    config, weights = MODELS[model]
    tensors = {key: tensor.to(dtype) for key, tensor in keys_of(weights, config, family, stacked).items()}
    if config.tied:
        tensors.pop("output_layer.weight", None)
    return write(root, tensors, common_of(config, step=30, **changes), as_file)


def check_model(path, model, dtype=torch.float32):
    config, weights = MODELS[model]
    source = open_source(path, true_vocab_size=config.vocab_size)
    assert source.iteration == 30
    check(source, {name: tensor.to(dtype).float() for name, tensor in weights.items()}, config)
    return source


@pytest.mark.slow(1)
@pytest.mark.parametrize("model", MODELS)
def test_weights_of_every_layout(model, tmp_path):
    layouts = {
        "stacked": {},
        "each_layer": {"stacked": False, "as_file": True},
        "local": {"family": "local", "dtype": torch.bfloat16},
    }
    for name, options in layouts.items():
        plain_tree(tmp_path / name / "iter_0000030", model, **options)
        (tmp_path / name / "latest_checkpointed_iteration.txt").write_text("30\n")
        check_model(tmp_path / name / "iter_0000030", model, options.get("dtype", torch.float32))
        check_model(tmp_path / name, model, options.get("dtype", torch.float32))


@pytest.mark.slow(1)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_parts_are_those_of_the_whole_and_of_the_tree_in_the_other_format(model, tmp_path):
    config, weights = MODELS[model]
    trees = megatron_trees if model == "gpt2" else megatron_llama_trees
    extra = {} if model == "gpt2" else {"rotary_interleaved": True}
    other = open_source(trees.write_tree(tmp_path / "torch", weights, tp=2, **extra), true_vocab_size=config.vocab_size)
    source = open_source(plain_tree(tmp_path / "dist", model, **extra), true_vocab_size=config.vocab_size)
    assert source.config == other.config and pickle.loads(pickle.dumps(source)).config == config
    draw = random.Random(5)
    for name, shape in parameter_shapes(config).items():
        whole = source.read(name)
        assert torch.equal(whole, other.read(name)), name
        for _ in range(4):
            begins = [draw.randrange(n + 1) for n in shape]
            part = [range(a, draw.randint(a, n)) for a, n in zip(begins, shape, strict=True)]
            expected = whole[tuple(slice(r.start, r.stop) for r in part)]
            assert torch.equal(source.read(name, part), expected), (name, part)


def test_only_the_pieces_that_are_asked_for_are_opened(tmp_path, monkeypatch):
    source = open_source(plain_tree(tmp_path / "dist", "llama"), true_vocab_size=LLAMA.vocab_size)
    opened, own = [], source.folder._piece

    def note(name, piece):
        opened.append(name)
        return own(name, piece)

    monkeypatch.setattr(source.folder, "_piece", note)
    source.read("blocks.2.attn.qkv.weight", [range(3), range(32)])
    assert opened == ["decoder.layers.self_attention.linear_qkv.weight"]


def test_gates_and_ups_as_two_tensors_and_norms_around_zero(tmp_path):
    config, weights = MODELS["llama"]
    tensors = keys_of(weights, config)
    both = tensors.pop("decoder.layers.mlp.linear_fc1.weight")
    tensors["decoder.layers.mlp.linear_fc1.weight_w"], tensors["decoder.layers.mlp.linear_fc1.weight_v"] = both.chunk(
        2, 1
    )
    tensors = {key: tensor - 1 if "norm" in key else tensor for key, tensor in tensors.items()}
    path = write(tmp_path / "dist", tensors, common_of(config, step=30, apply_layernorm_1p=True))
    source = open_source(path, true_vocab_size=config.vocab_size)
    for name in parameter_shapes(config):
        assert torch.allclose(source.read(name), weights[name], atol=1e-6), name


@pytest.fixture(scope="module")
def own_trees(tmp_path_factory):
    """Checkpoints that Megatron-LM's own code wrote."""
    root = tmp_path_factory.mktemp("own")
    for name in ("llama_tp2", "gpt2_dp2"):
        unpack(DATA / f"torch_dist_{name}.tar.xz", root)
    return root


def test_commands_take_a_tree_that_megatron_wrote(own_trees, tmp_path, capsys):
    tree = own_trees / "torch_dist_llama_tp2"
    code, out, err = in_process(["inspect", tree], capsys)
    assert (code, err) == (0, "") and "num_layers 2, hidden_size 16" in out and "qk_norm True" in out
    source = open_source(tree)
    for name, options in {"hf": ["--to", "hf"], "ours": [], "torch": ["--to", "megatron"]}.items():
        code, _, err = in_process(["convert", tree, tmp_path / name, *options], capsys)
        assert (code, err) == (0, ""), name
        back = open_source(tmp_path / name, true_vocab_size=source.config.vocab_size if name == "torch" else None)
        for parameter in parameter_shapes(source.config):
            assert torch.equal(back.read(parameter), source.read(parameter)), (name, parameter)
    code, _, err = in_process(["convert", tree, tmp_path / "fewer", "--true-vocab-size", "29"], capsys)
    assert (code, err) == (0, "") and open_source(tmp_path / "fewer").config.vocab_size == 29


def test_a_zero_keeps_its_sign(tmp_path):
    config, weights = MODELS["llama"]
    negative = {name: torch.full_like(tensor, -0.0) for name, tensor in weights.items()}
    source = open_source(write(tmp_path / "dist", keys_of(negative, config), common_of(config)), true_vocab_size=131)
    for name in parameter_shapes(config):
        assert source.read(name)[:131].signbit().all(), name


def refusal(path):
    with pytest.raises(UserError) as caught:
        source = open_source(path, true_vocab_size=131)
        for name in parameter_shapes(source.config):
            source.read(name)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700 and ";" in message
    return message


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return plain_tree(tmp_path_factory.mktemp("whole") / "dist", "gpt2")


@pytest.fixture
def tree(whole, tmp_path):
    """A copy to damage, and a function that changes its metadata."""
    path = tmp_path / "dist"
    path.mkdir()
    for file in whole.iterdir():
        os.link(file, path / file.name) if file.suffix == ".distcp" else (path / file.name).write_bytes(
            file.read_bytes()
        )

    def change(edit):
        with (path / ".metadata").open("rb") as file:
            metadata = pickle.load(file)
        edit(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        return refusal(path)

    return path, change


def places(metadata, name="decoder.layers.mlp.linear_fc1.weight"):
    return [(index, info) for index, info in metadata.storage_data.items() if index.fqn == name]


def set_place(metadata, number, **values):
    index, info = places(metadata)[number]
    metadata.storage_data[index] = replace(info, **values)


@pytest.mark.parametrize("name", ["../dist/__0_0.distcp", "/etc/passwd", "a/b", ".metadata", "", "x" * 300, 7])
def test_no_name_leads_out_of_the_folder(tree, name):
    assert "where the name of a file in the folder is due" in tree[1](lambda m: set_place(m, 0, relative_path=name))


@pytest.mark.parametrize("values", [{"length": 10}, {"offset": -1}, {"length": 1 << 70}, {"offset": True}])
def test_impossible_places(tree, values):
    assert ".metadata cannot be read" in tree[1](lambda m: set_place(m, 0, **values))


def test_pieces_that_share_bytes_or_lie_behind_the_end(tree):
    _, change = tree

    def share(metadata):
        first = places(metadata)[0][1]  # two pieces of equal size are two layers apart
        set_place(metadata, 2, relative_path=first.relative_path, offset=first.offset, length=first.length)

    assert "copy it again, whole" in change(lambda m: set_place(m, 1, offset=1 << 40))
    assert "has two pieces at byte" in change(share)


def test_pieces_that_are_not_the_tensor(tree):
    _, change = tree
    name = "decoder.layers.mlp.linear_fc1.weight"

    def claim(shape):
        def edit(metadata):
            metadata.state_dict_metadata[name].size = torch.Size(shape)

        return edit

    assert "are not all of its shape" in change(claim([4, 128, 1 << 40]))
    assert "not within its shape" in change(claim([4, 128, 3]))
    assert "not within its shape" in change(claim([1 << 50]))


def test_a_piece_is_not_what_the_metadata_says(tree):
    def swap(metadata):
        (a, first), (b, second) = (places(metadata, f"decoder.layers.mlp.linear_fc{n}.weight")[0] for n in (1, 2))
        metadata.storage_data[a], metadata.storage_data[b] = second, first

    assert "of decoder.layers.mlp.linear_fc1.weight; copy the folder again" in tree[1](swap)


def test_shapes_without_elements_claim_no_layers(tree):
    def empty(metadata):
        about = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.bias"]
        about.size, about.chunks = torch.Size([1 << 50, 0]), []

    assert "copy it again" in tree[1](empty)


@pytest.mark.parametrize("name, message", [
    ("decoder.layers.mlp.linear_fc1.bias", "has no tensor"), ("embedding.word_embeddings.weight", "of two dimensions"),
    ("common_state/shard_0_1", "neither common.pt nor")
])  # fmt: skip
def test_what_is_missing_is_named(tree, name, message):
    assert message in tree[1](lambda m: m.state_dict_metadata.pop(name))


def test_damaged_files(tree):
    path, _ = tree
    content = (path / ".metadata").read_bytes()
    noise = random.Random(0).randbytes(200)
    for damaged in (b"", content[:100], content[: len(content) // 2], b"\x80\x04]q\x00.", noise):
        (path / ".metadata").write_bytes(damaged)
        assert ".metadata cannot be read" in refusal(path)
    (path / ".metadata").write_bytes(content)
    file = next(iter(sorted(path.glob("*.distcp"))))
    data = file.read_bytes()
    file.unlink()
    assert f"{file.name} is missing" in refusal(path)
    file.write_bytes(data[:-500])
    assert "copy it again, whole" in refusal(path)
    file.write_bytes(b"\0" * len(data))
    assert "cannot be read" in refusal(path)
    (path / ".metadata").unlink()
    (path.parent / "latest_checkpointed_iteration.txt").write_text("1")
    path.rename(path.parent / "iter_0000001")
    assert "has no .metadata" in refusal(path.parent)


def outcome(path):
    """What a damaged folder becomes: its weights, or the sentence that tells of the damage."""
    try:
        source = open_source(path, true_vocab_size=131)
        return {name: source.read(name) for name in parameter_shapes(source.config)}
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)


@pytest.mark.slow(1)
def test_random_damage_is_told_or_changes_nothing(tree):
    """Bits that flip, ends that are cut off, and files that are gone or stand in the place of another."""
    path, _ = tree
    files = sorted(file for file in path.iterdir())
    whole, weights = {file: file.read_bytes() for file in files}, outcome(path)
    assert isinstance(weights, dict)
    for file in files:
        file.unlink()
        file.write_bytes(whole[file])  # links lead to the tree of other tests
    draw, told = random.Random(5), 0

    def tell(what):
        nonlocal told
        found = outcome(path)
        if isinstance(found, str):
            told += 1
        else:
            assert all(torch.equal(found[name], weights[name]) for name in weights), what

    for _ in range(30):
        file = draw.choice(files)
        damaged, place = bytearray(whole[file]), draw.randrange(len(whole[file]))
        damaged[place] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        tell(f"{file.name} {place}")
        file.write_bytes(whole[file])
    for file in files:
        for size in (0, 1, len(whole[file]) // 2, len(whole[file]) - 1):
            file.write_bytes(whole[file][:size])
            tell(f"{file.name} of {size} bytes")
        file.unlink()
        tell(f"no {file.name}")
        file.write_bytes(whole[file])
    assert told > 30


@pytest.mark.slow(1)
def test_pieces_have_a_checksum_each(tree):
    path, _ = tree
    pieces = [p for t in DistributedFolder(path).tensors.values() for p in t.pieces][::3]
    checked = 0
    for piece in pieces:
        file = path / piece.place.file
        whole = file.read_bytes()
        content = whole[piece.place.begin : piece.place.begin + piece.place.size]
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entry = next(e for e in archive.infolist() if "/data/" in e.filename)
        damaged = bytearray(whole)
        sizes = content[entry.header_offset + 26 : entry.header_offset + 30]
        first = entry.header_offset + 30 + sizes[0] + 256 * sizes[1] + sizes[2] + 256 * sizes[3]
        damaged[piece.place.begin + first + checked * 31 % entry.file_size] ^= 4
        file.unlink()
        file.write_bytes(damaged)
        assert f"{file} is damaged: a tensor of {entry.file_size} bytes" in refusal(path)
        file.write_bytes(whole)
        checked += 1
    assert checked > 5 and isinstance(outcome(path), dict)


def test_one_ranks_file_twice(tree):
    path, change = tree
    (file,) = path.glob("*.distcp")

    def in_two_files(metadata):
        for number, index in enumerate(metadata.storage_data):
            if number % 2:
                metadata.storage_data[index] = replace(metadata.storage_data[index], relative_path="__1_0.distcp")

    (path / "__1_0.distcp").write_bytes(file.read_bytes())
    assert "are the same file; copy the file of each rank" in change(in_two_files)
    (path / "__1_0.distcp").write_bytes(file.read_bytes() + b"x")
    assert isinstance(outcome(path), dict)


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("made_by_a_pickle",)


def test_nothing_in_the_pickles_is_run(tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, _ = tree
    (path / ".metadata").write_bytes(pickle.dumps(Hostile()))
    assert "where Metadata is due" in refusal(path)
    config, weights = MODELS["gpt2"]
    write(tmp_path / "other", keys_of(weights, config), common_of(config, step=Hostile(), vocab_file=Hostile()))
    assert open_source(tmp_path / "other").iteration == 0
    assert not os.path.exists("made_by_a_pickle")


@pytest.mark.parametrize("changes, message", [
    ({"num_layers": 5}, "num_layers=5"), ({"padded_vocab_size": 512}, "padded_vocab_size=512"),
    ({"hidden_size": 64}, "hidden_size=64"), ({"num_experts": 8}, "experts"), ({"swiglu": True}, "SwiGLU"),
    ({"softmax_scale": 3.0}, "another scale of scores"),
    ({"rotary_interleaved": 1}, "rotary_interleaved=1, which is neither True nor False")
])  # fmt: skip
def test_args_of_another_model(tmp_path, changes, message):
    assert message in refusal(plain_tree(tmp_path / "dist", "gpt2", **changes))


def test_tensors_that_no_model_here_has(tmp_path):
    config, weights = MODELS["gpt2"]
    common = {"args": args_of(config), "iteration": 30}
    tensors = keys_of(weights, config)
    assert "decoder.layers.0.mlp.router.weight" in refusal(
        write(tmp_path / "a", tensors | {"decoder.layers.mlp.router.weight": torch.ones(4, 2)}, common)
    )
    ints = tensors | {"decoder.final_layernorm.bias": torch.ones(32, dtype=torch.int32)}
    assert "torch.int32" in refusal(write(tmp_path / "b", ints, common))
    less = {key: tensor[:3] if "linear_fc1.bias" in key else tensor for key, tensor in tensors.items()}
    assert "has no tensor blocks.3.mlp.fc.bias" in refusal(write(tmp_path / "c", less, common))

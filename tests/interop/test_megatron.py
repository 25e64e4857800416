"""Reading Megatron-LM's checkpoints, written by `tests.support.megatron_trees`."""

import pickle
from dataclasses import replace

import pytest
import torch

from dtgpt.interop.megatron.export import save_megatron
from dtgpt.interop.megatron.model import Megatron
from dtgpt.models.decoder import unique_parameters
from dtgpt.models.gpt2 import TABLE, GPT2Config
from dtgpt.models.shared.foreign import cut
from dtgpt.models.source import parameter_shapes
from dtgpt.util.errors import UserError
from tests.support.megatron_trees import CONFIG, LAYER, PLANS, H, check, make_weights, padded, write_tree
from tests.support.whole_model import build_model

WPE = "embedding.wpe.weight"


@pytest.fixture(scope="module")
def weights():
    return make_weights()


def logits(tensors, config=CONFIG):
    model = build_model(config, torch.device("cpu"), torch.float32, None)
    with torch.no_grad():
        for name, parameter in unique_parameters(model).items():
            parameter.copy_(tensors(name))
        return model(torch.arange(32).view(2, 16) * 4)


VERSIONS = [(0, "local"), (1.0, "local"), (2.0, "local"), (3.0, "local"), (3.0, "mcore")]


@pytest.mark.slow(1)
@pytest.mark.parametrize("tp, pp, version, family", [
    (*plan, *kind) for turn, plan in enumerate(PLANS) for kind in VERSIONS[turn % 2 :: 2]
])  # fmt: skip
def test_weights_are_read_bitwise_from_every_plan_and_version(tmp_path, weights, tp, pp, version, family):
    source = Megatron(write_tree(tmp_path, weights, tp, pp, version, family), true_vocab_size=131)
    check(source, weights)
    assert (source.iteration, source.notes) == (30, [])
    assert torch.equal(logits(source.read), logits(weights.__getitem__))


@pytest.mark.parametrize("family", ["local", "mcore", "te"])
@pytest.mark.parametrize("tp", [1, 2])
def test_interleaved_stages_are_put_in_order(tmp_path, weights, tp, family):
    write_tree(tmp_path, weights, tp, 2, family=family, chunks=2)
    check(Megatron(tmp_path, true_vocab_size=131), weights)


def test_a_missing_version_is_the_oldest_but_not_for_mcore(tmp_path, weights):
    for family, version in (("local", 0), ("te", 3.0)):
        root = write_tree(tmp_path / family, weights, 2, version=version, family=family)
        for path in root.glob("*/*/*.pt"):
            content = torch.load(path, weights_only=False)
            del content["checkpoint_version"]
            content["args"].tensor_model_parallel_size = 2
            torch.save(content, path)
        check(Megatron(root, true_vocab_size=131), weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_weights_come_as_fp32(tmp_path, weights, dtype):
    write_tree(tmp_path, weights, 2, 2, dtype=dtype, layernorm_epsilon=1e-6)
    config = GPT2Config(num_layers=4, hidden_size=32, num_heads=4, seq_length=16, vocab_size=131, layer_norm_eps=1e-6)
    source = Megatron(tmp_path / "iter_0000030", true_vocab_size=131)
    check(source, {n: t.to(dtype).float() for n, t in weights.items()}, config)


@pytest.mark.parametrize("version", [0, 1.0, 3.0])
def test_parts_are_those_of_the_whole(tmp_path, weights, version):
    source = Megatron(write_tree(tmp_path, weights, 4, 2, version), true_vocab_size=131)
    for name, tensor in weights.items():
        for dim, size in enumerate(tensor.shape):
            for begin, end in [(0, 1), (3, size - 2), (size // 4, size // 2), (size - 5, size), (size, size), (0, 0)]:
                part = [range(n) for n in tensor.shape]
                part[dim] = range(begin, end)
                found = source.read(name, part)
                assert torch.equal(found, cut(tensor, part)), (name, part)
                assert found.untyped_storage().nbytes() == 4 * found.numel()


def test_a_source_goes_to_another_process(tmp_path, weights):
    source = Megatron(write_tree(tmp_path, weights, 2, 2), true_vocab_size=131)
    sent = pickle.dumps(source)
    assert len(sent) < 20_000  # no tensors
    check(pickle.loads(sent), weights)


def test_layer_norm_weights_around_zero(tmp_path, weights):
    stored = {n: t - 1 if ".ln_" in n and n.endswith("weight") else t for n, t in weights.items()}
    source = Megatron(write_tree(tmp_path, stored, apply_layernorm_1p=True), true_vocab_size=131)
    check(source, {n: t + 1 if ".ln_" in n and n.endswith("weight") else t for n, t in stored.items()})


def test_without_a_true_vocabulary_the_table_is_kept_whole(tmp_path, weights):
    source = Megatron(write_tree(tmp_path, weights, 2))
    assert source.config.vocab_size == 256
    assert torch.equal(source.read(TABLE)[130:], weights[TABLE][130:131].expand(126, H))


@pytest.mark.parametrize("tp", [1, 2])
def test_the_padding_of_gpt2s_vocabulary_is_recognized(tmp_path, weights, tp):
    def save(content, path):
        rows = padded(50257, tp) // tp
        content["args"].padded_vocab_size = rows * tp
        content["model"]["language_model"]["embedding"]["word_embeddings"]["weight"] = torch.ones(rows, H)
        torch.save(content, path)

    root = write_tree(tmp_path, weights, tp, save=save)
    source = Megatron(root)
    assert source.config.vocab_size == 50257 and "50257" in source.notes[0]
    assert source.read(TABLE)[:50257].eq(1).all() and source.read(TABLE)[50257:].eq(0).all()
    assert Megatron(root, true_vocab_size=50259).config.vocab_size == 50259


def ngc_like(root, hidden=128):
    """As the 345M release: fp16, `transformer`, `.attention.`, no args, no version, QKV [3, np, hn], not a zip file."""
    config = GPT2Config(num_layers=2, hidden_size=hidden, num_heads=2, seq_length=16, vocab_size=128)
    generator = torch.Generator().manual_seed(3)
    ours = {n: torch.randn(s, generator=generator).half() for n, s in parameter_shapes(config).items()}
    transformer = {}
    for layer in range(2):
        for theirs, _, _, _, name in LAYER:
            tensor = ours[f"blocks.{layer}.{name}"]
            if "qkv" in name:
                tensor = tensor.view(2, 3, hidden // 2, -1).transpose(0, 1).reshape(tensor.shape).contiguous()
            transformer[f"layers.{layer}.{theirs.replace('self_attention', 'attention')}"] = tensor
    for kind in ("weight", "bias"):
        transformer[f"final_layernorm.{kind}"] = ours[f"head.ln_f.{kind}"]
    embedding = {"word_embeddings": {"weight": ours[TABLE]}, "position_embeddings": {"weight": ours[WPE]}}
    path = root / "release" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    content = {"iteration": 0, "model": {"language_model": {"embedding": embedding, "transformer": transformer}}}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    (root / "latest_checkpointed_iteration.txt").write_text("release\n")
    return config, {n: t.float() for n, t in ours.items()}


def test_a_release_without_args_opens_as_it_is(tmp_path):
    config, ours = ngc_like(tmp_path)
    source = Megatron(tmp_path)
    check(source, ours, config)
    assert source.iteration == 0
    assert "heads" in source.notes[0] and "128 / 64 = 2" in source.notes[0]
    ngc_like(tmp_path / "odd", hidden=96)
    with pytest.raises(UserError, match="96 is not a multiple of 64"):
        Megatron(tmp_path / "odd")


def test_older_names_of_the_same(tmp_path, weights):
    def save(content, path):
        language_model = content["model"]["language_model"]
        embedding = language_model.pop("embedding")
        for kind, value in embedding.items():  # flat
            language_model[f"{kind}.weight"] = value["weight"]
        renamed = {k.replace("layernorm", "norm"): v for k, v in language_model.pop("encoder").items()}
        language_model["encoder"] = renamed  # names of 2024
        torch.save(content, path)

    check(Megatron(write_tree(tmp_path, weights, 2, save=save), true_vocab_size=131), weights)


def test_model_rng_of_2022_beside_folders_of_its_optimizer(tmp_path, weights):
    folder = write_tree(tmp_path, weights, 2) / "iter_0000030"
    for t in range(2):
        (folder / f"mp_rank_0{t}" / "model_optim_rng.pt").rename(folder / f"mp_rank_0{t}" / "model_rng.pt")
        (folder / f"mp_rank_0{t}_000").mkdir()
        (folder / f"mp_rank_0{t}_000" / "optim.pt").write_bytes(b"")
    check(Megatron(tmp_path, true_vocab_size=131), weights)


@pytest.mark.parametrize("openai_gelu", [False, True])
def test_without_its_fusion_gelu_is_exact_unless_it_is_openais(tmp_path, weights, openai_gelu):
    write_tree(tmp_path, weights, bias_gelu_fusion=False, openai_gelu=openai_gelu)
    source = Megatron(tmp_path, true_vocab_size=131)
    assert source.config == replace(CONFIG, activation="gelu_tanh" if openai_gelu else "gelu") and source.notes == []
    save_megatron(source, tmp_path / "again", 1, 1, torch.float32)
    assert Megatron(tmp_path / "again", true_vocab_size=131).config == source.config

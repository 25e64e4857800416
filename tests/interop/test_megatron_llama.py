"""LLaMA, Mistral and Qwen3 in Megatron-LM's trees, both ways: trees that its own code wrote and made ones."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtgpt.checkpoint.open import open_source
from dtgpt.interop.megatron.export import save_megatron
from dtgpt.interop.megatron.llama import check_export
from dtgpt.interop.megatron.model import Megatron
from dtgpt.interop.pickles import open_pickle
from dtgpt.models.llama import LlamaConfig
from dtgpt.models.shared.foreign import cut
from dtgpt.util.errors import UserError
from tests.commands.test_cli import in_process
from tests.support.archives import unpack
from tests.support.megatron_llama_trees import CONFIG, D, F, H, make_weights, write_tree
from tests.support.megatron_trees import InMemory, assert_same, check
from tests.support.megatron_trees import make_weights as gpt2_weights
from tests.support.megatron_trees import write_tree as write_gpt2
from tests.support.other_architecture import OtherConfig
from tests.support.pairwise import each_pair
from tests.support.sources import load_model

DATA = Path(__file__).parents[1] / "fixtures" / "megatron"
QWEN3 = replace(CONFIG, tied=True, qk_norm=True)
QWEN25 = replace(CONFIG, tied=True, attention_bias="qkv")
CONFIGS = {"untied": CONFIG, "norms of heads": QWEN3, "biases": QWEN25}
OTHER = OtherConfig(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=131)
FAMILIES = ("nested", "local", "transformer_engine")
OWN = {
    "llama_tp2": LlamaConfig(
        num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_hidden_size=96, seq_length=32,
        vocab_size=256,
    ),
    "qwen3_tp2_pp2": LlamaConfig(
        num_layers=4, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, ffn_hidden_size=48, seq_length=32,
        vocab_size=256, tied=True, qk_norm=True, norm_eps=1e-6, rope_theta=1e6, rope_factor=8.0,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(OWN))
def own(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("own")
    unpack(DATA / f"{request.param}.tar.xz", root)
    return root / request.param


def logits(source, tokens):
    with torch.no_grad():
        return load_model(source, torch.device("cpu"))(tokens)


def test_logits_are_those_of_megatrons_model(own):
    source = Megatron(own)
    tokens, expected = torch.load(own / "expected.pt")
    assert source.config == OWN[own.name] and source.iteration == 3 and source.notes == []
    assert expected.std() > 0.1 and (logits(source, tokens) - expected).abs().max() < 1e-5


def test_what_megatrons_code_wrote_is_written_again_bitwise(own, tmp_path):
    sizes = 2, 2 if own.name.endswith("pp2") else 1
    consumed = 6 if own.name == "qwen3_tp2_pp2" else 0
    save_megatron(Megatron(own), tmp_path / "out", *sizes, iteration=3, consumed_samples=consumed)
    for path in own.rglob("model_optim_rng.pt"):
        ours, theirs = open_pickle(tmp_path / "out" / path.relative_to(own)), open_pickle(path)
        assert_same(ours["model"], theirs["model"])
        known = vars(theirs["args"])
        differ = {name for name, value in vars(ours["args"]).items() if name in known and known[name] != value}
        assert differ <= {"vocab_size"} and ours["checkpoint_version"] == theirs["checkpoint_version"]


def test_every_command_takes_the_tree(own, tmp_path, capsys):
    tokens, expected = torch.load(own / "expected.pt")
    code, out, err = in_process(["inspect", own], capsys)
    assert (code, err) == (0, "") and "num_kv_heads 2" in out
    sizes = ["--target-tensor-parallel-size", "4", "--target-pipeline-parallel-size", "2"]
    formats = {
        "ours": [],
        "hf": ["--to", "hf"],
        "tree": ["--to", "megatron", *sizes, "--transformer-impl", "transformer_engine"],
    }
    for name, options in formats.items():
        code, _, err = in_process(["convert", own, tmp_path / name, *options], capsys)
        assert (code, err) == (0, "")
    sources = [open_source(tmp_path / name, true_vocab_size=256) for name in formats]
    assert sources[-1].tensor_parallel_size == 4
    for source in sources:
        assert (logits(source, tokens) - expected).abs().max() < 1e-5


@each_pair(plan=[(1, 1, 1), (2, 2, 1), (4, 1, 1), (1, 2, 2)], kind=CONFIGS, family=FAMILIES)
def test_trees_of_every_family_are_read_and_written_bitwise(tmp_path, plan, kind, family):
    """Four ranks share two groups of keys and values, as Megatron-LM lets them."""
    (tp, pp, chunks), config = plan, CONFIGS[kind]
    weights = make_weights(config)
    theirs = write_tree(tmp_path / "theirs", weights, config, tp, pp, family, chunks)
    source = Megatron(theirs, true_vocab_size=config.vocab_size)
    check(source, weights, config)
    assert source.notes == []
    save_megatron(source, tmp_path / "ours", tp, pp, iteration=30, family=family)
    check(Megatron(tmp_path / "ours", true_vocab_size=config.vocab_size), weights, config)
    if chunks == 1 and family != "nested":  # LLaMA is written with mcore's names; nested ones are today's of GPT-2
        for path in theirs.rglob("model_optim_rng.pt"):
            ours, expected = open_pickle(tmp_path / "ours" / path.relative_to(theirs)), open_pickle(path)
            assert_same(ours["model"], expected["model"])
            assert vars(ours["args"]).items() >= vars(expected["args"]).items()


def test_parts_are_those_of_the_whole(tmp_path):
    weights = make_weights()
    source = Megatron(write_tree(tmp_path, weights, tp=2, pp=2), true_vocab_size=131)
    for name, tensor in weights.items():
        for dim, size in enumerate(tensor.shape):
            part = [range(n) for n in tensor.shape]
            part[dim] = range(3, size - 2)
            assert torch.equal(source.read(name, part), cut(tensor, part)), name


def test_neighbouring_columns_that_rotate_are_put_in_halves(tmp_path):
    """--rotary-interleaved turns columns 0 and 1 where dtgpt turns 0 and D / 2; values have no positions."""
    weights, halves = make_weights(QWEN3), torch.arange(D).view(2, D // 2).t().flatten()

    def change(content):
        for name, tensor in content["model"].items():
            if name.endswith("linear_qkv.weight"):
                heads = tensor.view(-1, D, H)
                is_value = torch.arange(len(heads)) % 4 == 3
                content["model"][name] = torch.where(is_value[:, None, None], heads, heads[:, halves]).flatten(0, 1)
            elif name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
                content["model"][name] = tensor[halves]

    root = write_tree(tmp_path / "2", weights, QWEN3, 2, change=change, rotary_interleaved=True)
    check(Megatron(root, true_vocab_size=131), weights, QWEN3)
    with pytest.raises(UserError, match="rotary_interleaved=True and 2 query groups on 4 ranks"):
        Megatron(write_tree(tmp_path / "4", weights, QWEN3, 4, rotary_interleaved=True))


def test_args_of_2023(tmp_path):
    """A converted Llama 2 with the option that came before position_embedding_type, and one without grouped queries."""
    config = replace(CONFIG, rope_theta=10000.0, num_kv_heads=4)
    weights = make_weights(config)
    old = {
        "position_embedding_type": "learned_absolute", "use_rotary_position_embeddings": True,
        "add_position_embedding": False, "rotary_base": "absent", "group_query_attention": False,
        "num_query_groups": 1, "kv_channels": D, "qk_layernorm": "absent",
    }  # fmt: skip

    def change(content):
        content["model"]["language_model"]["rotary_pos_emb.inv_freq"] = torch.ones(D // 2)

    root = write_tree(tmp_path, weights, config, 2, family="nested", change=change, **old)
    check(Megatron(root, true_vocab_size=131), weights, config)


def test_the_older_order_of_qkv(tmp_path):
    config = replace(CONFIG, num_kv_heads=4)
    weights = make_weights(config)

    def change(content):
        content["checkpoint_version"] = 0
        for name, tensor in content["model"]["language_model"]["encoder"].items():
            if "query_key_value" in name:
                by_kind = tensor.view(-1, 3, D, H).transpose(0, 1)
                content["model"]["language_model"]["encoder"][name] = by_kind.reshape(tensor.shape).contiguous()

    root = write_tree(tmp_path / "old", weights, config, 2, family="nested", change=change)
    check(Megatron(root, true_vocab_size=131), weights, config)
    version = {"change": lambda content: content.update(checkpoint_version=1.0)}
    with pytest.raises(UserError, match=r"checkpoint_version before 2\.0, which has no grouped queries"):
        Megatron(write_tree(tmp_path / "grouped", make_weights(), family="nested", **version))


def test_norms_around_zero(tmp_path):
    weights = make_weights(QWEN3)
    stored = {name: t - 1 if "norm" in name else t for name, t in weights.items()}
    source = Megatron(write_tree(tmp_path, stored, QWEN3, 2, layernorm_zero_centered_gamma=True), true_vocab_size=131)
    check(source, {name: stored[name] + 1 if "norm" in name else t for name, t in weights.items()}, QWEN3)


@pytest.mark.parametrize(("vocab", "tp"), [(32000, 4), (128256, 4), (151936, 2), (32000, 1), (32768, 8)])
def test_the_padding_of_known_vocabularies_is_recognized(tmp_path, vocab, tp):
    config = replace(CONFIG, num_layers=1, num_heads=8, num_kv_heads=8, vocab_size=vocab, tied=True, hidden_size=H)
    rows = (vocab + 128 * tp - 1) // (128 * tp) * 128

    def change(content):
        content["model"]["embedding.word_embeddings.weight"] = torch.ones(1, H).expand(rows, H).contiguous()

    weights = make_weights(replace(config, vocab_size=131))
    small = replace(config, vocab_size=131)
    source = Megatron(write_tree(tmp_path, weights, small, tp, change=change, padded_vocab_size=rows * tp))
    assert source.config.vocab_size == vocab and len(source.notes) == (rows * tp != vocab)


def test_a_scaling_that_megatron_does_not_compute_is_noted(tmp_path, capsys):
    config = replace(CONFIG, rope_factor=32.0, tied=True)
    weights = make_weights(config)
    root = write_tree(tmp_path / "tree", weights, config, use_rope_scaling=True, rope_scaling_factor=32.0)
    (note,) = Megatron(root, true_vocab_size=131).notes
    assert "rope_scaling_factor=32" in note and "takes 8" in note
    code, _, err = in_process(
        ["convert", root, tmp_path / "out", "--to", "megatron", "--true-vocab-size", "131"], capsys
    )
    assert code == 0 and err.startswith("warning: ") and "takes 8" in err
    assert Megatron(tmp_path / "out", true_vocab_size=131).config == config
    off = write_tree(tmp_path / "off", weights, config, rope_scaling_factor=32.0)
    check(Megatron(off, true_vocab_size=131), weights, replace(config, rope_factor=1.0))


@pytest.mark.parametrize(("changes", "words"), [
    ({"normalization": "LayerNorm"}, r"another norm \(normalization=LayerNorm\), .* its LLaMA has"),
    ({"position_embedding_type": "learned_absolute"}, "not rotary .position_embedding_type=learned_absolute"),
    ({"position_embedding_type": "yarn"}, "position_embedding_type=yarn"), ({"swiglu": False}, "swiglu=False"),
    ({"squared_relu": True}, "squared ReLU"), ({"add_bias_linear": True}, r"biases \(add_bias_linear=True"),
    ({"add_qkv_bias": True}, "no tensor blocks.0.attn.qkv.bias"), ({"rotary_percent": 0.5}, "rotary_percent=0.5"),
    ({"rotary_seq_len_interpolation_factor": 2}, "interpolated"), ({"no_rope_freq": 4}, "no_rope_freq=4"),
    ({"window_size": (128, 0)}, "sliding windows"), ({"num_experts": 8}, "no tensor blocks.0.mlp.router.weight"),
    ({"hybrid_layer_pattern": "*-*-*-*-"}, "hybrid_layer_pattern="),
    ({"normalization": "LayerNorm", "swiglu": False}, "normalization=LayerNorm.*swiglu=False"),
    ({"num_query_groups": 3}, "num_kv_heads=3 does not divide"), ({"num_query_groups": None}, "num_query_groups=None"),
    ({"kv_channels": 15}, "head_dim=15 is odd"), ({"kv_channels": 8}, "linear_qkv|attn.qkv.weight of shape"),
    ({"ffn_hidden_size": 2 * F}, "gate_up.weight of shape"),
    ({"qk_layernorm": True}, "no tensor blocks.0.attn.q_norm.weight"),
    ({"untie_embeddings_and_output_weights": False}, "holds head.output|copy of the token table"),
    ({"rotary_base": "big"}, "rotary_base='big'"),
    ({"use_rope_scaling": True, "rope_scaling_factor": float("nan")}, "rope_scaling_factor=nan"),
    ({"hidden_size": 64}, "hidden_size=64, but the checkpoint's tensors have 32")
])  # fmt: skip
def test_a_model_that_is_not_llama_is_refused(tmp_path, changes, words):
    tree = write_tree(tmp_path, make_weights(), **changes)
    if "untie_embeddings_and_output_weights" in changes:  # mcore's name is also that of a tied copy
        (note,) = Megatron(tree, true_vocab_size=131).notes
        assert "copy of the token table that differs" in note
        tree = write_tree(tmp_path / "nested", make_weights(), family="nested", **changes)
        words = r"untie_embeddings_and_output_weights"
    with pytest.raises(UserError, match=words) as refusal:
        Megatron(tree)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("key", "words"), [
    ("decoder.layers.1.mlp.linear_fc1.bias", "holds blocks.1.mlp.gate_up.bias"),
    ("embedding.position_embeddings.weight", "embedding.position_embeddings.weight, which LLaMA does not have"),
    ("decoder.layers.0.self_attention.linear_kv.weight", "linear_kv.weight, which LLaMA does not have"),
    ("decoder.layers.0.input_layernorm.weight", "blocks.0.norm_1.weight twice")
])  # fmt: skip
def test_tensors_that_llama_does_not_have_are_named(tmp_path, key, words):
    def change(content):
        content["model"][key] = torch.ones(H)

    with pytest.raises(UserError, match=words):
        Megatron(write_tree(tmp_path, make_weights(), family="transformer_engine", change=change))


def test_ranks_of_two_architectures_are_refused(tmp_path):
    root = write_tree(tmp_path / "llama", make_weights(), tp=2)
    other = write_gpt2(tmp_path / "gpt2", gpt2_weights(), 2)
    (other / "iter_0000030/mp_rank_01").rename(root / "iter_0000030/mp_rank_01-")
    path = root / "iter_0000030/mp_rank_01/model_optim_rng.pt"
    path.unlink()
    (root / "iter_0000030/mp_rank_01-/model_optim_rng.pt").rename(path)
    with pytest.raises(UserError, match=r"mp_rank_01/model_optim_rng\.pt has architecture='GPT-2'"):
        Megatron(root)


@pytest.mark.parametrize(("config", "sizes", "words"), [
    (OTHER, (1, 1), "of the architecture other, and a Megatron-LM tree holds one of mixtral, .*, gpt2, llama; keep"),
    (CONFIG, (3, 1), "num_heads=4 cannot be split over tensor_parallel_size=3"),
    (replace(CONFIG, ffn_hidden_size=22), (4, 1), "ffn_hidden_size=22 cannot be split"),
    (replace(CONFIG, num_heads=6, num_kv_heads=3), (2, 1), "num_kv_heads=3 cannot be split"),
    (CONFIG, (1, 3), "num_layers=4 cannot be split over pipeline_parallel_size=3"),
    (replace(CONFIG, rope_factor=8.0, rope_original_length=4096), (1, 1), "rope_original_length=4096 .* has 8192"),
    (replace(CONFIG, attention_bias="all"), (1, 1), "attention_bias=all cannot be written for Megatron-LM"),
    (replace(CONFIG, window=CONFIG.seq_length - 1), (1, 1), "window=.* cannot be written for Megatron-LM")
])  # fmt: skip
def test_exports_that_cannot_be_are_refused_before_anything_is_written(tmp_path, config, sizes, words):
    with pytest.raises(UserError, match=words):
        save_megatron(InMemory(config, {}), tmp_path / "out", *sizes)
    assert not list(tmp_path.iterdir())


def test_a_window_that_hides_nothing_can_be_written():
    assert check_export(replace(CONFIG, window=CONFIG.seq_length)) == check_export(CONFIG)

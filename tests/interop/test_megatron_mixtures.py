"""Mixtures of experts in Megatron-LM's trees and in torch_dist: files that tests write by its names, and dtgpt's."""

import pickle
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtgpt.checkpoint.open import open_source
from dtgpt.interop.megatron.export import save_megatron
from dtgpt.interop.megatron.model import Megatron
from dtgpt.interop.megatron.training import MegatronTraining
from dtgpt.interop.pickles import open_pickle
from dtgpt.models.families.granitemoe import GraniteMoeConfig
from dtgpt.models.llama import LlamaConfig
from dtgpt.models.shared.foreign import cut
from dtgpt.models.source import parameter_shapes
from dtgpt.util.errors import UserError
from tests.commands.test_cli import in_process
from tests.support.archives import unpack
from tests.support.megatron_mixture_trees import (
    CONFIGS,
    FORMS,
    SHAPE,
    E,
    F,
    H,
    args_of,
    dist_keys,
    make_weights,
    name_of,
    write_tree,
)
from tests.support.megatron_trees import InMemory, assert_same, check
from tests.support.pairwise import each_pair
from tests.support.sources import TOLERANCE, load_model
from tests.support.torch_dist import write

DATA = Path(__file__).parents[1] / "fixtures" / "megatron"
PLANS = [(1, 1, 1, 1), (2, 1, 2, 1), (1, 2, 4, 1), (2, 2, 1, 1), (1, 2, 2, 2), (1, 1, 2, 1)]  # tp, pp, ep, chunks
WEIGHTS = {kind: make_weights(config) for kind, config in CONFIGS.items()}


@pytest.mark.slow(4)
@each_pair(plan=PLANS, kind=CONFIGS, form=FORMS, family=("local", "transformer_engine"))
def test_trees_are_read_and_written_bitwise(tmp_path, plan, kind, form, family):
    (tp, pp, ep, chunks), config, weights = plan, CONFIGS[kind], WEIGHTS[kind]
    theirs = write_tree(tmp_path / "theirs", weights, config, tp, pp, ep, chunks, family, form)
    source = Megatron(theirs, true_vocab_size=131)
    check(source, weights, config)
    assert source.notes == [] and source.iteration == 30
    save_megatron(source, tmp_path / "ours", tp, pp, iteration=30, family=family, expert_parallel_size=ep)
    check(Megatron(tmp_path / "ours", true_vocab_size=131), weights, config)
    if chunks == 1 and form == "each":
        expected = theirs
    else:
        expected = write_tree(tmp_path / "expected", weights, config, tp, pp, ep, family=family)
    paths = [path.relative_to(expected) for path in expected.rglob("model_optim_rng.pt")]
    assert {p.relative_to(tmp_path / "ours") for p in (tmp_path / "ours").rglob("*.pt")} == {*paths}
    for path in paths:
        ours, wanted = open_pickle(tmp_path / "ours" / path), open_pickle(expected / path)
        assert_same(ours["model"], wanted["model"])
        known = {name: value for name, value in vars(wanted["args"]).items() if value is not None}
        assert vars(ours["args"]).items() >= known.items()


@pytest.mark.parametrize("name", ["mixtral_ep2", "qwen2_moe_tp2", "glm4_moe_tp2_ep2"])
def test_trees_of_megatrons_own_modules(name, tmp_path):
    unpack(DATA / f"{name}.tar.xz", tmp_path)
    source, theirs = Megatron(tmp_path / name), tmp_path / name
    tokens, expected = torch.load(theirs / "expected.pt")
    with torch.no_grad():
        found = load_model(source, torch.device("cpu"))(tokens)
    assert source.notes == [] and (found - expected).abs().max() < TOLERANCE * expected.abs().max()
    sizes = source.tensor_parallel_size, source.pipeline_parallel_size
    save_megatron(source, tmp_path / "out", *sizes, iteration=3, expert_parallel_size=source.expert_parallel_size)
    for path in theirs.rglob("model_optim_rng.pt"):
        assert_same(open_pickle(tmp_path / "out" / path.relative_to(theirs))["model"], open_pickle(path)["model"])


def test_names_and_shapes_are_those_that_megatron_lm_documents(tmp_path):
    save_megatron(
        InMemory(CONFIGS["glm4_moe"], WEIGHTS["glm4_moe"]), tmp_path / "out", 2, 2, torch.bfloat16, 30,
        expert_parallel_size=2,
    )  # fmt: skip
    model = open_pickle(tmp_path / "out/iter_0000030/mp_rank_01_001_001/model_optim_rng.pt")["model"]
    of_layer = {
        key.removeprefix("decoder.layers.1.mlp."): (tuple(tensor.shape), tensor.dtype)
        for key, tensor in model.items()
        if ".layers.1.mlp." in key and tensor is not None
    }
    each = {"linear_fc1.weight": ((F, H), torch.bfloat16), "linear_fc2.weight": ((H, F // 2), torch.bfloat16)}
    assert of_layer == {
        "router.weight": ((E, H), torch.bfloat16),
        "router.expert_bias": ((E,), torch.float32),
        "shared_experts.linear_fc1.weight": ((16, H), torch.bfloat16),
        "shared_experts.linear_fc2.weight": ((H, 8), torch.bfloat16),
        **{f"experts.local_experts.{m}.{name}": about for m in range(2) for name, about in each.items()},
    }
    assert "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1._extra_state" in model


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_those_of_the_source(kind, tmp_path):
    config, weights = CONFIGS[kind], WEIGHTS[kind]
    tokens = torch.randint(131, (2, 16), generator=torch.Generator().manual_seed(1))
    tree = write_tree(tmp_path, weights, config, 2, 2, 2, form="one tensor")
    with torch.no_grad():
        found, expected = (
            load_model(source, torch.device("cpu"))(tokens)
            for source in (Megatron(tree, true_vocab_size=131), InMemory(config, weights))
        )
    assert torch.equal(found, expected) and expected.std() > 0.1


@pytest.mark.parametrize("kind", CONFIGS)
def test_parts_are_those_of_the_whole(kind, tmp_path):
    config, weights = CONFIGS[kind], WEIGHTS[kind]
    source = pickle.loads(pickle.dumps(Megatron(write_tree(tmp_path, weights, config, 2, 1, 2), true_vocab_size=131)))
    check_parts(source, weights)


def check_parts(source, weights):
    draw = random.Random(5)
    for name, tensor in weights.items():
        for _ in range(4):
            begins = [draw.randrange(n + 1) for n in tensor.shape]
            part = [range(a, draw.randint(a, n)) for a, n in zip(begins, tensor.shape, strict=True)]
            assert torch.equal(source.read(name, part), cut(tensor, part)), (name, part)


def test_a_sigmoid_router_without_a_correction_has_one_of_zero(tmp_path):
    config = replace(CONFIGS["glm4_moe"], rotated=1.0)
    weights = {
        name: torch.zeros_like(tensor) if "correction" in name else tensor
        for name, tensor in WEIGHTS["glm4_moe"].items()
    }

    def change(content, *_):
        for key in [key for key in content["model"] if key.endswith("expert_bias")]:
            del content["model"][key]

    off = {"moe_router_enable_expert_bias": False, "rotary_percent": 1.0, "change": change}
    check(Megatron(write_tree(tmp_path, weights, config, **off), true_vocab_size=131), weights, config)


def test_commands_take_and_write_them(tmp_path, capsys):
    tree = write_tree(tmp_path / "tree", WEIGHTS["qwen3_moe"], CONFIGS["qwen3_moe"], ep=2)
    code, out, err = in_process(["inspect", tree], capsys)
    assert (code, err) == (0, "") and "num_experts 4" in out
    words = ["--to", "megatron", "--target-expert-parallel-size", "4", "--true-vocab-size", "131"]
    code, _, err = in_process(["convert", tree, tmp_path / "out", *words], capsys)
    assert (code, err) == (0, "")
    source = open_source(tmp_path / "out", true_vocab_size=131)
    assert source.expert_parallel_size == 4
    check(source, WEIGHTS["qwen3_moe"], CONFIGS["qwen3_moe"])


def test_tokens_that_were_dropped_are_noted(tmp_path):
    tree = write_tree(tmp_path, WEIGHTS["mixtral"], CONFIGS["mixtral"], moe_expert_capacity_factor=1.0)
    (note,) = Megatron(tree, true_vocab_size=131).notes
    assert "moe_expert_capacity_factor" in note and "drops none" in note


def without(*keys):
    def change(content, t, p, e):
        for key in keys:
            if (t, p, e) == (0, 0, 1):
                del content["model"][key]

    return change


EXPERT = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"


@pytest.mark.parametrize(("changes", "words"), [
    ({"change": without(EXPERT)}, r"_001/model_optim_rng.pt has no tensor blocks.0.mlp.experts.gate_up.weight\[1\]"),
    ({"change": without("decoder.layers.1.mlp.router.weight")}, r"_001/.* has no tensor blocks.1.mlp.router.weight"),
    ({"num_experts": 8}, "num_experts=8, but the checkpoint's tensors have 4"),
    ({"num_experts": 5}, "num_experts=5, which expert_model_parallel_size=2 ranks cannot share"),
    ({"num_experts": [4]}, r"num_experts=\[4\]; it must be a whole number"),
    ({"moe_router_topk": 5}, "experts_per_token=5 is more than"),
    ({"moe_router_topk": "2"}, "moe_router_topk='2'"), ({"moe_ffn_hidden_size": 2 * F}, "gate_up.weight.* of shape"),
    ({"moe_layer_freq": [1, 1, 1]}, "moe_layer_freq of 3 layers and num_layers=4"),
    ({"moe_layer_freq": 0}, "moe_layer_freq=0, neither a number"),
    ({"moe_layer_freq": 2}, r"blocks without experts \(moe_layer_freq=2\), .* its Mixtral has"),
    ({"expert_tensor_parallel_size": 2}, "experts cut over other than tensor_model_parallel_size=1 ranks"),
    ({"moe_router_pre_softmax": True}, r"weights by the softmax over all experts \(moe_router_pre_softmax=True\)"),
    ({"moe_router_score_function": "sqrtsoftplus"}, "sqrtsoftplus"),
    ({"moe_router_load_balancing_type": "sinkhorn"}, "optimal transport"), ({"moe_latent_size": 8}, "_latent_size=8"),
    ({"moe_shared_expert_intermediate_size": 16}, "moe_shared_expert"), ({"moe_extended_tp": True}, "over all ranks"),
    ({"moe_mlp_glu_interleave_size": 32}, "gates and ups in blocks"), ({"multi_latent_attention": True}, "latent att"),
    ({"add_bias_linear": True}, "biases"), ({"normalization": "LayerNorm"}, "another norm"),
    ({"moe_router_topk_scaling_factor": 2.0}, "a factor of the weights"), ({"softmax_type": "learnable"}, "softmax"),
    ({"num_experts": None}, "mlp.router.weight, which LLaMA does not have"),
])  # fmt: skip
def test_what_is_not_whole_or_not_here_is_told_in_a_sentence(tmp_path, changes, words):
    tree = write_tree(tmp_path, WEIGHTS["mixtral"], CONFIGS["mixtral"], ep=2, **changes)
    with pytest.raises(UserError, match=words) as refusal:
        Megatron(tree)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_rank_that_is_missing_is_named(tmp_path, pp):
    """In a tree without a pipeline the only further number of a folder is that of the expert-parallel rank."""
    tree = write_tree(tmp_path, WEIGHTS["mixtral"], CONFIGS["mixtral"], pp=pp, ep=4)
    for e, told in ((1, 1), (3, 1), (2, 1)):
        shutil.rmtree(tree / "iter_0000030" / name_of(0, pp - 1, e, pp, 4))
        with pytest.raises(UserError, match=f"{name_of(0, pp - 1, told, pp, 4)}/model_optim_rng.pt is missing"):
            Megatron(tree)


def test_files_that_changed_places_are_noticed(tmp_path):
    def number(content, t, p, e):
        content["args"].rank = t + 2 * e

    tree = write_tree(tmp_path, WEIGHTS["mixtral"], CONFIGS["mixtral"], 2, 1, 2, change=number)
    one, other = (tree / "iter_0000030" / name_of(0, 0, e, 1, 2) for e in range(2))
    check(Megatron(tree, true_vocab_size=131), WEIGHTS["mixtral"], CONFIGS["mixtral"])
    one.rename(tree / "x")
    other.rename(one)
    (tree / "x").rename(other)
    with pytest.raises(UserError, match="was written by rank"):
        Megatron(tree)


def test_one_tensor_of_all_experts_must_have_their_sizes(tmp_path):
    def change(content, *_):
        content["model"]["decoder.layers.0.mlp.experts.weight1"] = torch.ones(H, 7)

    with pytest.raises(UserError, match=r"weight1 of shape \[32, 7\], in which 4 experts have no matrices"):
        Megatron(write_tree(tmp_path, WEIGHTS["mixtral"], CONFIGS["mixtral"], form="one tensor", change=change))


@pytest.mark.parametrize(("config", "sizes", "words"), [
    (CONFIGS["mixtral"], (1, 1, 3), "num_experts=4 cannot be split over expert_parallel_size=3; use .*1, 2 or 4"),
    (replace(CONFIGS["mixtral"], ffn_hidden_size=21), (2, 1, 1), "expert_size=21 cannot be split"),
    (CONFIGS["glm4_moe"], (4, 1, 1), "num_kv_heads=2 cannot be split over tensor_parallel_size=4"),
    (replace(CONFIGS["glm4_moe"], normalise_weights=False), (1, 1, 1), "normalise_weights=False cannot be written"),
    (replace(CONFIGS["glm4_moe"], experts_per_token=1), (1, 1, 1), "leaves that of a single one"),
    (replace(CONFIGS["glm4_moe"], experts_per_token=4, expert_groups=4, open_groups=1, num_experts=16), (1, 1, 1),
     "open_groups=1 of 4 cannot be written .* best 4 experts"),
    (replace(CONFIGS["mixtral"], experts_per_token=1), (1, 1, 1), "experts_per_token=1 cannot be written"),
    (replace(CONFIGS["mixtral"], activation="gelu_tanh"), (1, 1, 1), "activation=gelu_tanh cannot be written"),
    (replace(CONFIGS["qwen3_moe"], attention_bias="all"), (1, 1, 1), "attention_bias=all cannot be written"),
    (GraniteMoeConfig(**{**SHAPE, "ffn_hidden_size": F}), (1, 1, 1), "of the architecture granitemoe, and a Megatron"),
    (LlamaConfig(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_hidden_size=24),
     (1, 1, 2), "expert_parallel_size=2, but a model of llama has no experts"),
])  # fmt: skip
def test_exports_that_cannot_be_are_refused_before_anything_is_written(tmp_path, config, sizes, words):
    with pytest.raises(UserError, match=words):
        save_megatron(InMemory(config, {}), tmp_path / "out", *sizes[:2], expert_parallel_size=sizes[2])
    assert not list(tmp_path.iterdir())


def dist_tree(root, kind, stacked=True, more=lambda tensors: {}, counters=None, **changes):
    config, tensors = CONFIGS[kind], dist_keys(WEIGHTS[kind], CONFIGS[kind], stacked)
    common = {"args": args_of(config, **changes), "checkpoint_version": 3.0, "iteration": 30}
    common |= {} if counters is None else {"optimizer": counters}
    return write(root, tensors | more(tensors), common)


ALIKE = {kind: kind in ("mixtral", "qwen2_moe") for kind in CONFIGS}  # layers are stacked where they are all alike


@pytest.mark.parametrize("kind", CONFIGS)
def test_torch_dist(kind, tmp_path):
    source = open_source(dist_tree(tmp_path, kind, ALIKE[kind]), true_vocab_size=131)
    check(source, WEIGHTS[kind], CONFIGS[kind])
    check_parts(pickle.loads(pickle.dumps(source)), WEIGHTS[kind])


def test_torch_dist_with_gates_and_ups_of_each_expert_by_themselves(tmp_path):
    config, tensors = CONFIGS["glm4_moe"], dist_keys(WEIGHTS["glm4_moe"], CONFIGS["glm4_moe"], stacked=False)
    for key in [key for key in tensors if ".experts.experts." in key]:
        for number, matrix in enumerate(tensors.pop(key)):
            own = key.replace("experts.experts.", f"experts.experts.{number}.")
            halves = zip(("_w", "_v"), matrix.chunk(2), strict=True) if "fc1" in key else [("", matrix)]
            tensors |= {own + end: half for end, half in halves}
    common = {"args": args_of(config), "checkpoint_version": 3.0, "iteration": 30}
    check(open_source(write(tmp_path, tensors, common), true_vocab_size=131), WEIGHTS["glm4_moe"], config)


@pytest.mark.parametrize(("key", "words"), [
    ("decoder.layers.mlp.experts.experts.linear_fc2.weight", r"no tensor blocks.0.mlp.experts.down.weight\[0\]"),
    ("decoder.layers.mlp.router.weight", "no tensor blocks.0.mlp.router.weight")
])  # fmt: skip
def test_torch_dist_without_a_tensor_is_refused(key, words, tmp_path):
    tensors = dist_keys(WEIGHTS["mixtral"], CONFIGS["mixtral"])
    del tensors[key]
    common = {"args": args_of(CONFIGS["mixtral"]), "checkpoint_version": 3.0, "iteration": 30}
    with pytest.raises(UserError, match=words):
        open_source(write(tmp_path / "1", tensors, common))
    with pytest.raises(UserError, match="num_experts=8, but the checkpoint's tensors have 4"):
        open_source(dist_tree(tmp_path / "2", "mixtral", num_experts=8))


def test_a_run_goes_on_with_master_weights_and_moments_of_experts(tmp_path):
    """Corrections, which no optimizer moves, have neither."""
    kind, config = "glm4_moe", CONFIGS["glm4_moe"]

    def states(tensors):
        trained = {key: tensor for key, tensor in tensors.items() if not key.endswith("expert_bias")}
        kinds = {"exp_avg": 0.5, "exp_avg_sq": 2.0, "fp32_param": 1.0}
        made = {f"optimizer.state.{name}.{key}": x * t for name, x in kinds.items() for key, t in trained.items()}
        return made | {key: tensor.bfloat16() for key, tensor in trained.items()}

    counters = {0: {"optimizer": {"param_groups": [{"step": 30}]}}, 1: {"optimizer": {"param_groups": [{"step": 30}]}}}
    tree = dist_tree(
        tmp_path, kind, False, states, counters, consumed_train_samples=60, optimizer="adam", seq_length=16
    )
    run = MegatronTraining(tree, 131)
    assert (run.state["updates"], run.notes) == (30, [])
    for name, shape in parameter_shapes(config).items():
        part = tuple(map(range, shape))
        expected = WEIGHTS[kind][name]
        assert torch.equal(run.read(name), expected), name
        for moment, factor in (("exp_avg", 0.5), ("exp_avg_sq", 2.0)):
            wanted = 0 * expected if "correction" in name else factor * expected
            assert torch.equal(run.read_moment(name, moment, part), wanted), (name, moment)

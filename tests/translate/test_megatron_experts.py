"""Options of Megatron-LM for experts: which family of dtgpt a command becomes, with what balance."""

import re
from dataclasses import asdict

import pytest

from dtgpt.config.overrides import leaves
from dtgpt.models.config import class_of
from dtgpt.optim.balance.config import BalanceConfig
from dtgpt.translate.megatron_experts import EXPERTS
from dtgpt.translate.megatron_table import MIXTURES
from dtgpt.translate.options import flat
from tests.translate.conftest import recipe_of

SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--kv-channels 16 --seq-length 32 --ffn-hidden-size 96 --vocab-size 300 --tokenizer-type NullTokenizer"
)
LLAMA = "--disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope"
TRAINING = "--micro-batch-size 2 --global-batch-size 8 --lr 1e-4 --train-iters 100 --data-path x"
COMMAND = f"pretrain_gpt.py {SIZES} {LLAMA} {TRAINING} --untie-embeddings-and-output-weights --num-experts 8"
SIGMOID = "--moe-router-score-function sigmoid"
GPT_OSS = (
    f"pretrain_gpt.py {SIZES} --normalization RMSNorm --position-embedding-type rope --quick-geglu "
    f"--glu-linear-offset 1 --activation-func-clamp-value 7 --softmax-type learnable {TRAINING} --num-experts 8"
)
WAYS = (  # of speed and memory, of which none changes a result
    "--moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall --moe-router-fusion "
    "--overlap-moe-expert-parallel-comm --moe-router-dtype fp32 --moe-router-padding-for-fp8 --moe-per-layer-logging "
    "--expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --moe-shared-expert-overlap"
)


@pytest.mark.slow(1)
@pytest.mark.parametrize("command, family, fields", [
    (f"{COMMAND} --moe-ffn-hidden-size 48 {WAYS}", "mixtral",
     {"num_experts": 8, "experts_per_token": 2, "ffn_hidden_size": 48, "num_kv_heads": 2, "tied": False}),
    (f"{COMMAND} --moe-router-topk 4", "mixtral", {"experts_per_token": 4, "ffn_hidden_size": 96}),
    (f"{COMMAND} --qk-layernorm --moe-ffn-hidden-size 48 --moe-layer-freq 2 --moe-router-topk 8", "qwen3_moe",
     {"expert_size": 48, "ffn_hidden_size": 96, "expert_pattern": "ED", "normalise_weights": True,
      "attention_bias": "none"}),
    (f"{COMMAND} --qk-layernorm --moe-router-pre-softmax --moe-layer-freq ([0]+[1]*3) --add-qkv-bias", "qwen3_moe",
     {"expert_size": 96, "expert_pattern": "DEEE", "normalise_weights": False, "attention_bias": "qkv"}),
    (f"{COMMAND} --moe-router-pre-softmax --moe-shared-expert-intermediate-size 160 --moe-shared-expert-gate "
     "--add-qkv-bias", "qwen2_moe",
     {"shared_size": 160, "normalise_weights": False, "attention_bias": "qkv", "expert_pattern": "E"}),
    (f"{COMMAND} {SIGMOID} --moe-router-enable-expert-bias --moe-router-topk 4 --moe-router-topk-scaling-factor 2.5 "
     "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-layer-freq ([0]*1+[1]*3) --rotary-percent 0.5 "
     "--moe-shared-expert-intermediate-size 48 --moe-ffn-hidden-size 48", "glm4_moe",
     {"routed_factor": 2.5, "expert_groups": 4, "open_groups": 2, "dense_blocks": 1, "rotated": 0.5,
      "shared_size": 48, "expert_size": 48, "normalise_weights": True, "attention_bias": "none", "qk_norm": False}),
    (f"{COMMAND} {SIGMOID} --qk-layernorm", "glm4_moe",
     {"shared_size": 0, "dense_blocks": 0, "rotated": 1.0, "qk_norm": True, "routed_factor": 1.0, "open_groups": 1}),
    (f"{GPT_OSS} --moe-router-topk 4 --moe-ffn-hidden-size 48", "gpt_oss",
     {"num_experts": 8, "experts_per_token": 4, "ffn_hidden_size": 48, "activation": "clamped_swiglu"}),
])  # fmt: skip
def test_the_family_is_the_one_that_has_the_router(translated, command, family, fields):
    recipe, out = translated(command)
    assert recipe.model.architecture == family
    assert {name: getattr(recipe.model, name) for name in fields} == fields
    assert recipe.balance == BalanceConfig() or "bias" in command
    assert "cannot be done" not in out
    for word in command.split()[1:]:  # whatever it became, it is told
        assert not word.startswith("--") or word in out or word == "--tokenizer-type"


@pytest.mark.parametrize("command, plan", [
    (f"{COMMAND} --expert-model-parallel-size 4 --use-distributed-optimizer", "ep4_zero1"),
    (f"torchrun --nproc-per-node 8 {COMMAND} --expert-model-parallel-size 4 --tensor-model-parallel-size 2", "ep4_tp2"),
    (f"torchrun --nproc-per-node 4 {COMMAND} --expert-model-parallel-size 4 --context-parallel-size 2", "cp2_ep4"),
    (f"{COMMAND.replace('--num-experts 8', '')} --expert-model-parallel-size 4", "dp"),
])  # fmt: skip
def test_experts_are_spread_over_as_many_ranks(translated, command, plan):
    recipe, out = translated(command)
    assert set(recipe.plan.split("_")) == set(plan.split("_")) and "cannot be done" not in out


@pytest.mark.parametrize("words, told", [
    ("--moe-router-pre-softmax", "weights by the softmax over all experts, which a Mixtral does not have"),
    (f"{SIGMOID} --moe-layer-freq 2", "--moe-layer-freq 2 (blocks without experts behind the first ones, which a GLM"),
    (f"{SIGMOID} --moe-router-num-groups 4 --moe-router-group-topk 2", "groups by the sum of other than their two"),
    ("--moe-shared-expert-intermediate-size 48", "an MLP that all tokens share, which a Mixtral does not have"),
    ("--moe-router-score-function sqrtsoftplus", "sqrtsoftplus (scores that are no softmax, which a Mixtral does not"),
    ("--moe-router-load-balancing-type sinkhorn", "a choice by optimal transport or quantiles"),
    ("--moe-router-enable-expert-bias", "a correction of the choice, which a Mixtral does not have"),
    ("--multi-latent-attention", "--multi-latent-attention (attention has plain"),
    ("--moe-latent-size 16", "--moe-latent-size 16 (experts always see a token's own"),
    ("--rotary-percent 0.5", "all columns rotate in a Mixtral"), ("--mtp-num-layers 1", "no model here has it"),
    ("--moe-layer-freq 0", "--moe-layer-freq 0: '0' is not as in 2 or"),
    ("--moe-layer-freq [1,0]", "is of 2 layers, and the model has 4"), ("--moe-router-topk x", "'x' is not a number"),
    ("--moe-aux-loss-coeff 0.1 0.2", "are 1 kinds and 2 coefficients"),
])  # fmt: skip
def test_another_model_is_refused_with_what_does_not_fit(run, words, told):
    code, out = run("--", *f"{COMMAND} {words}".split())
    assert code == 2 and told in " ".join(out.split()) and len(out.strip().splitlines()) == 1


def test_a_gpt2_has_no_experts(run):
    code, out = run("--", *COMMAND.replace(LLAMA, "").split())
    assert code == 2 and "--num-experts 8 (begin with a recipe of a mixture of experts" in out


# Megatron-LM adds the losses of layers up, and its loads are parts of all choices; here losses are means over the 4
# layers, and the loads of the batch add up to the 2 experts of a token.
@pytest.mark.parametrize("words, balance", [
    ("--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type global_aux_loss", {"loss": 0.02, "layers": "apart"}),
    ("--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss", {"loss": 0.04, "over": "sequence"}),
    ("--moe-aux-loss-coeff 0.01 --micro-batch-size 1", {"loss": 0.04, "over": "sequence"}),
    ("--moe-aux-loss-coeff 0.01 --micro-batch-size 8", {"loss": 0.02, "layers": "apart"}),
    ("--moe-aux-loss-coeff 0.01 --moe-layer-freq [0,1,0,0] --qk-layernorm --micro-batch-size 1",
     {"loss": 0.01, "over": "sequence"}),
    ("--moe-z-loss-coeff 0.001", {"z_loss": 0.004}), ("--moe-aux-loss-coeff 0.0", {}),
    ("--moe-router-load-balancing-type none", {}), ("--moe-router-bias-update-rate 0.1", {}),
    (f"{SIGMOID} --moe-router-enable-expert-bias", {"bias_step": 0.001}),
    (f"{SIGMOID} --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2 --moe-aux-loss-coeff 1e-4 "
     "--moe-router-load-balancing-type seq_aux_loss", {"bias_step": 0.01, "loss": 0.0004, "over": "sequence"}),
])  # fmt: skip
def test_balance(translated, words, balance):
    recipe, out = translated(f"{COMMAND} {words}")
    assert asdict(recipe.balance) == {**asdict(BalanceConfig()), **balance}
    assert "cannot be done" not in out


@pytest.mark.parametrize("words, told, balance", [
    ("--moe-aux-loss-coeff 0.01", "of a micro-batch would depend on the plan; the recipe has --balance.loss 0.02",
     {"loss": 0.02, "layers": "apart"}),
    ("--moe-aux-loss-coeff 0.01 0.1 --moe-router-load-balancing-type seq_aux_loss global_aux_loss",
     "one auxiliary loss, the first one here", {"loss": 0.04, "over": "sequence"}),
    ("--moe-expert-capacity-factor 1.0", "no token is dropped, as the plan would decide which one; even loads", {}),
    ("--moe-input-jitter-eps 0.1", "no noise is added to routers", {}),
    ("--moe-router-dtype fp64", "routers always multiply in fp32", {}),
    ("--moe-router-force-load-balancing", "goes to the experts that it chooses", {}),
    ("--moe-extended-tp", "zero3 in the plan shards weights", {}), ("--moe-use-upcycling", "experts begin anew", {}),
    ("--moe-unheard-of 3", "dtgpt has no equivalent of it", {}),
])  # fmt: skip
def test_what_cannot_be_done_is_told_and_stands_in_the_recipe(run, tmp_path, words, told, balance):
    code, out = run("--", *f"{COMMAND} {words}".split())
    assert code == 0 and told in " ".join(out.partition("cannot be done")[2].split())
    docstring = (tmp_path / "my_recipe.py").read_text().split('"""')[1]
    assert told in " ".join(docstring.split())
    assert asdict(recipe_of(tmp_path).balance) == {**asdict(BalanceConfig()), **balance}


def test_a_model_without_experts_needs_none_of_the_options(translated):
    recipe, out = translated(f"{COMMAND.replace('--num-experts 8', '')} --moe-router-topk 2 --moe-grouped-gemm")
    assert recipe.model.architecture == "llama" and "it has no effect on a model without experts" in " ".join(
        out.split()
    )


def test_answers_name_options_that_a_family_has():
    known = {f"model.{name}" for family in MIXTURES for name, *_ in leaves(class_of(family))}
    known |= {f"balance.{name}" for name in asdict(BalanceConfig())} | {"recompute", "plan"}
    for key, answer in flat({"": EXPERTS}).items():
        assert {*re.findall(r"(?<!\S)--([a-z_.0-9]+)", answer.text)} <= known, key

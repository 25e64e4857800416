"""Low-rank adapters: training under every plan, checkpoints, merged models and peft's form."""

import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import dtgpt
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.sections import OptimizerConfig
from dtgpt.evaluation.command import EvalOptions, evaluate
from dtgpt.interop.convert import ConvertOptions, convert
from dtgpt.interop.inspect import inspect
from dtgpt.optim.fp8.precision import FP8
from dtgpt.optim.muon import MuonConfig
from dtgpt.planning.memory import memory_of
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.train.init_from.shape import open_config
from dtgpt.train.loop import train
from dtgpt.train.setup import open_trainer
from dtgpt.train.start import override
from dtgpt.util.errors import UserError
from tests.support.bodies_lora import assert_gradients_of_float64, steps_of_peft, train_and_save
from tests.support.disks import files_of_at_most
from tests.support.families import MODELS, initial_model
from tests.support.ranks import pool

pytestmark = pytest.mark.slow(8)

STEPS, RANK = 4, 4
LORA = LoraConfig(rank=RANK, alpha=16.0)
SIZES = {"vocab_size": 257, "bos_token_id": None, "eos_token_id": None}
LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "tie_word_embeddings": True,
}  # fmt: skip
TOKENS = (torch.arange(24) * 10).view(2, 12)


def save_base(kind: str, folder: Path, seed: int = 0, **sizes) -> Path:
    """A model as transformers saves it, with weights that matter."""
    torch.manual_seed(seed)
    if kind in MODELS:
        model = initial_model(kind, seed, vocab_size=257, max_position_embeddings=16, **sizes)
    elif kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **LLAMA))
    else:
        config = transformers.GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=2, n_positions=16)
        model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def logits_of(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).to(dtype)
        if dtype == torch.float64:  # in which torch has no grouped product of experts
            model.set_experts_implementation("eager")
        return model(TOKENS).logits


def assert_round_alike(ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
    """Two right computations in fp32 differ by their rounding, which depends on the machine's kernels: each is as near
    to the same in float64 as the other, up to a small factor."""
    near, other = ((each.double() - exact).abs().max().item() for each in (ours, theirs))
    assert near <= 4 * max(other, 2e-7 * exact.abs().max().item()), (near, other)


def opened_by_peft(base: str, adapter: Path, **options) -> nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    return peft.PeftModel.from_pretrained(model, str(adapter), **options)


@pytest.fixture
def kind(request):
    return request.param


@pytest.fixture
def lora(recipe, kind, tmp_path):
    """A run that trains adapters on a base, for GPT-2 with dropout."""
    base = save_base(kind, tmp_path / "base")
    config = replace(open_config(base), dropout=0.0 if kind == "llama" else 0.1)
    optimizer = OptimizerConfig(lr=1e-2, warmup=0, schedule="constant", weight_decay=0.1)
    return replace(recipe, model=config, init_from=str(base), lora=LORA, optimizer=optimizer, steps=STEPS)


PLANS = {"llama": ["tp2_sp_pp2", "cp2"], "gpt2": ["tp2", "dp2_zero3"], "gpt_oss": ["tp2_sp"]}


@pytest.mark.parametrize("kind", PLANS, indirect=True)
def test_every_plan_follows_one_process_and_goes_on_where_another_stopped(lora, kind, tmp_path):
    losses, weights = train_and_save(lora, tmp_path / "one", STEPS)
    assert losses[-1] < losses[0] - 0.05
    assert len(weights) == 2 * 4 * lora.model.num_layers  # A and B of four matrices in each block
    assert all(name.endswith((".lora.a", ".lora.b")) for name in weights)
    for plan in PLANS[kind]:
        run = tmp_path / plan
        found = pool().run(parse_plan(plan).world, train_and_save, replace(lora, plan=plan), run, 2)[0][0]
        found += train_and_save(replace(lora, micro_batch_size=2, init_from=None), run, STEPS)[0]  # as one process
        assert found == pytest.approx(losses, abs=1e-6), plan


@pytest.mark.parametrize("kind", ["llama"], indirect=True)
def test_a_run_goes_on_with_a_base_that_was_moved(lora, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = replace(lora, name="moved", micro_batch_size=1, global_batch_size=1)
    common = ["--log.sample_tokens", "0", "--runs", "runs", "--device", "cpu", "--steps"]
    words = [*common, "3", "--resume", "runs/moved-001"]
    assert train(override(file, [*common, "2"])) == 0
    Path(lora.init_from).rename("elsewhere")
    with pytest.raises(UserError, match=r"base, the base of the adapters, does not exist; name it .* --init_from"):
        train(override(file, words))
    with pytest.raises(UserError, match=r"adapters of a model that was at .*, which does not exist; .* --adapter runs"):
        dtgpt.load("runs/moved-001")
    save_base("llama", tmp_path / "other", seed=1)
    with pytest.raises(UserError, match=r"is an adapter for another model than .*other: its base was"):
        train(override(file, [*words, "--init_from", "other"]))
    assert train(override(file, [*words, "--init_from", "elsewhere"])) == 0
    assert train(override(file, [*common, "4", "--resume", "auto"])) == 0  # the newest checkpoint names the new place
    assert dtgpt.load("runs/moved-001") is not None


@pytest.mark.parametrize("kind", ["llama"], indirect=True)
def test_training_follows_peft(lora, tmp_path):
    """Fifty steps of adapters on transformers' model, by torch's AdamW."""
    # The first gradients are tiny: without an epsilon of their size, Adam makes rounding a step of full size.
    lora = replace(lora, steps=50, optimizer=replace(lora.optimizer, lr=2e-3, eps=1e-5))
    run = tmp_path / "run"
    train_and_save(lora, run, 0)  # the adapters of the first step
    convert(run / "checkpoints" / "step_00000000", tmp_path / "peft", ConvertOptions(to="peft"))
    model = opened_by_peft(lora.init_from, tmp_path / "peft", is_trainable=True)
    with open_trainer(lora) as trainer:
        theirs = steps_of_peft(model, map(trainer.batch, range(50)), 2e-3)
        for _ in range(50):
            loss = trainer.mean_loss(trainer.train_step())
            assert loss == pytest.approx(next(theirs), rel=1e-5), trainer.step
        held = sum(t.nbytes for s in trainer.shards for t in (s.local, *trainer.optimizer.rule.state(s.index).values()))
        frozen = sum(s.local.nbytes for s in trainer.shards.frozen)
        planned = memory_of(trainer.settings, 0)
        assert planned.weights + planned.optimizer == held + frozen


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "phi3"], indirect=True)
def test_a_merged_model_is_that_of_its_parts_in_every_form(lora, kind, tmp_path):
    run = tmp_path / "run"
    train_and_save(lora, run, STEPS)
    checkpoint = run / "checkpoints" / f"step_{STEPS:08d}"
    assert sum(file.stat().st_size for file in checkpoint.glob("weights*")) < 60_000  # of adapters alone
    ours = dtgpt.load(lora.init_from, adapter=checkpoint, device="cpu")(TOKENS)
    assert (ours - logits_of(lora.init_from)).abs().max() > 0.05
    torch.testing.assert_close(dtgpt.load(checkpoint, device="cpu")(TOKENS), ours, rtol=0, atol=0)
    convert(checkpoint, tmp_path / "merged", ConvertOptions(to="hf"))
    exact = logits_of(tmp_path / "merged", torch.float64)
    assert_round_alike(ours, logits_of(tmp_path / "merged"), exact)
    with (
        files_of_at_most(4000),  # less than the adapters take
        pytest.raises(UserError, match=r"peft cannot be written .*File too large"),
    ):
        convert(checkpoint, tmp_path / "peft", ConvertOptions(to="peft"))
    convert(checkpoint, tmp_path / "peft", ConvertOptions(to="peft"))
    assert len({path.stat().st_mode for path in (tmp_path / "peft").iterdir()}) == 1  # by the umask
    again = dtgpt.load(lora.init_from, adapter=tmp_path / "peft", device="cpu")(TOKENS)
    assert_round_alike(again, ours, exact)
    with torch.no_grad():
        theirs = opened_by_peft(lora.init_from, tmp_path / "peft")(TOKENS).logits
    assert_round_alike(theirs, ours, exact)
    said, whole = (inspect(path, tensors=True) for path in (checkpoint, tmp_path / "merged"))
    assert f"adapters of rank {LORA.rank}, merged here into {lora.init_from}" in said
    assert said[said.index("attn.qkv.weight") :] == whole[whole.index("attn.qkv.weight") :]  # digests of the weights


@pytest.mark.parametrize("kind", ["llama"], indirect=True)
def test_an_adapter_of_something_else_is_refused(lora, kind, tmp_path):
    run = tmp_path / "run"
    train_and_save(lora, run, 1)
    checkpoint = run / "checkpoints" / "step_00000001"
    convert(checkpoint, tmp_path / "peft", ConvertOptions(to="peft"))
    with pytest.raises(UserError, match="peft holds an adapter and no model; give the model that it is for, with --a"):
        dtgpt.load(tmp_path / "peft")
    other = save_base(kind, tmp_path / "other", seed=1)
    with pytest.raises(UserError, match=r"is an adapter for another model than .*other: its base was .*base, with"):
        dtgpt.load(other, adapter=checkpoint)
    with pytest.raises(UserError, match="was trained on adapters, and the recipe trains the weights"):
        train_and_save(replace(lora, lora=LoraConfig()), run, STEPS)
    with pytest.raises(UserError, match=r"has other adapters: alpha 16.0 there, 8.0 here"):
        train_and_save(replace(lora, lora=replace(LORA, alpha=8.0)), run, STEPS)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(UserError, match="has use_dora=true; dtgpt reads adapters of LORA without it"):
        dtgpt.load(lora.init_from, adapter=tmp_path / "peft")
    for given, wrong in (
        ({"layer_replication": [[1, 2], [0, 1]]}, "layer_replication=.* without it"),
        ({"alpha_pattern": {r".*\.[01]\.mlp": 3}}, "dtgpt reads names of modules there, and no expressions"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', by which peft changes the base"),
    ):
        (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config | given))
        with pytest.raises(UserError, match=wrong):
            dtgpt.load(lora.init_from, adapter=tmp_path / "peft")
    Path(lora.init_from).rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"adapters of a model that was at .*base, which does not exist; put it back"):
        dtgpt.load(checkpoint)
    with pytest.raises(UserError, match=r"every file verified; .* does not exist; put it back"):
        inspect(checkpoint)


VARIANTS = {
    "llama": [{"target_modules": ["q_proj", "v_proj", "down_proj"]},
              {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"v_proj": 6, "0.mlp.up_proj": 2},
               "alpha_pattern": {"o_proj": 3.0, "1.self_attn.q_proj": 5.0}}],
    "gpt2": [{"target_modules": ["c_attn", "c_fc", "mlp.c_proj"], "fan_in_fan_out": True,
              "alpha_pattern": {"c_attn": 3}}],
    "gpt_neo": [{"target_modules": "all-linear"}], "olmo3": [{"target_modules": "all-linear"}],
    "gpt_oss": [{"target_modules": ["q_proj", "k_proj", "o_proj"]}],
    "phi3": [{"target_modules": "all-linear", "rank_pattern": {"qkv_proj": 6}}],
    "olmoe": [{"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}],  # which peft takes for stacks
    "mixtral": [{"target_modules": ["w1", "w2", "w3"], "use_rslora": True}],
    "qwen3_moe": [{"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
                  {"target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "mlp.gate.weight"],
                   "rank_pattern": {"gate_up_proj": 5}, "alpha_pattern": {"1.mlp.experts.gate_up_proj": 3.0}}],
    "gpt_oss_moe": [{"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}],
}  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt2"], indirect=True)
def test_results_of_an_evaluation_name_the_adapter_and_its_step(lora, kind, tmp_path):
    train_and_save(lora, tmp_path / "run", STEPS)
    adapter, data = str(tmp_path / "run" / "checkpoints" / f"step_{STEPS:08d}"), tmp_path / "x.txt"
    data.write_text("one two three")
    found = []
    for path, given in ((lora.init_from, adapter), (adapter, None), (lora.init_from, None)):
        output = tmp_path / "eval.json"
        asked = {"task": ("lambada",), "data": (str(data),), "output": str(output), "tokenizer": "bytes"}
        evaluate(Path(path), EvalOptions(**asked, adapter=given, device="cpu"))
        found.append(json.loads(output.read_text())["model"])
    assert [model.get("adapter") for model in found] == [adapter, None, None]
    assert [model.get("step") for model in found] == [STEPS, STEPS, None]
    assert found[0]["sha256"] == found[1]["sha256"] != found[2]["sha256"]


@pytest.mark.parametrize("kind", VARIANTS)
def test_adapters_that_peft_made_are_read(kind, tmp_path):
    base = save_base(kind, tmp_path / "base")
    for number, given in enumerate(VARIANTS[kind]):
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        settings = peft.LoraConfig(r=4, lora_alpha=10, task_type="CAUSAL_LM", **given)
        adapted = peft.get_peft_model(model, settings).eval()
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.1 * torch.randn_like(parameter))
            theirs = adapted(TOKENS).logits
        adapted.save_pretrained(tmp_path / f"{number}")
        ours = dtgpt.load(base, adapter=tmp_path / f"{number}", device="cpu")(TOKENS)
        assert (ours - logits_of(base)).abs().max() > 0.05
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 * ours.abs().max().item())


@pytest.mark.parametrize("kind", ["gpt_oss"], indirect=True)
def test_adapters_of_experts_are_merged_and_not_written_for_peft(lora, tmp_path):
    train_and_save(lora, tmp_path / "run", 1)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    with pytest.raises(
        UserError, match=r"has an adapter of blocks.0.mlp.gate_up.weight, which transformers keeps in a"
    ):
        convert(checkpoint, tmp_path / "peft", ConvertOptions(to="peft"))
    convert(checkpoint, tmp_path / "merged", ConvertOptions(to="hf"))
    ours = dtgpt.load(lora.init_from, adapter=checkpoint, device="cpu")(TOKENS)
    exact = logits_of(tmp_path / "merged", torch.float64)
    assert_round_alike(ours, logits_of(tmp_path / "merged"), exact)


@pytest.mark.parametrize("kind", ["llama"], indirect=True)
def test_the_gate_holds_adapters_to_float64(lora, tmp_path):
    assert_gradients_of_float64(lora, tmp_path)


@pytest.mark.parametrize("kind", ["llama"], indirect=True)
def test_what_adapters_cannot_be_trained_with_is_refused(lora):
    for changes, words in (
        ({"init_from": None}, "adapts a model that is trained already; name it with --init_from"),
        ({"lora": replace(LORA, rank=-1)}, "lora.rank=-1 is not the rank of an adapter; use 1 to 32"),
        (
            {"lora": replace(LORA, targets="qkv,head")},
            "lora.targets='qkv,head' is not known; use some of qkv,column,row",
        ),
        ({"lora": LoraConfig(alpha=8)}, "lora.alpha=8 has no effect with lora.rank=0; give --lora.rank"),
        ({"precision": FP8}, "adapters are not computed with products in fp8"),
        ({"optimizer": MuonConfig(lr=1e-3)}, "optimizer.kind=muon is for whole matrices, and AdamW trains adapters"),
        ({"reduce": "exact"}, "reduce=exact sums the gradients of whole weights alone"),
    ):
        with pytest.raises(UserError, match=words), open_trainer(replace(lora, **changes)):
            pass
    with pytest.raises(UserError, match="the schedule ZBVZeroBubble makes gradients of weights apart"):
        replace(lora, plan="pp2_zbv", model=replace(lora.model, num_layers=4)).plan_for(2)

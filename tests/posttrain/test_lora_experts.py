"""Adapters of experts: their definition, plans, memory, checkpoints, merged models, and peft's two forms."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dtgpt
from dtgpt.compare.gate import Reference
from dtgpt.compare.record import Tracing
from dtgpt.compare.trace import Key
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.sections import OptimizerConfig
from dtgpt.interop.convert import ConvertOptions, convert
from dtgpt.models.moe.mixture import Stack
from dtgpt.optim.balance.config import BalanceConfig
from dtgpt.planning.memory import memory_of
from dtgpt.posttrain.lora.adapters import Adapter, attach
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.train.init_from.shape import open_config
from dtgpt.train.setup import open_trainer
from dtgpt.util.errors import UserError
from tests.posttrain.test_lora import TOKENS, assert_round_alike, logits_of, opened_by_peft, save_base
from tests.support.bodies_balance import balanced_steps
from tests.support.bodies_lora import train_and_save
from tests.support.families import EXPERTS
from tests.support.ranks import pool
from tests.support.runs import traced_record

pytestmark = pytest.mark.slow(18)

STEPS, RANK = 3, 3
LORA = LoraConfig(rank=RANK, alpha=12.0)


def run_of(recipe, kind, folder, layers=2, **changes):
    """A run that trains adapters on a base of a family."""
    base = save_base(kind, folder / "base", num_hidden_layers=layers)
    optimizer = OptimizerConfig(lr=1e-2, warmup=0, schedule="constant", weight_decay=0.1)
    model = replace(open_config(base), dropout=0.1)
    given = {"model": model, "init_from": str(base), "lora": LORA, "optimizer": optimizer, "steps": STEPS, **changes}
    return replace(recipe, **given)


def test_a_row_meets_the_adapter_of_its_expert_alone():
    """Against the sum of the matrices, row by row, in float64: the output and all gradients."""
    generator = torch.Generator().manual_seed(2)

    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    stack = Stack(4, 6, 10, bias=True).double()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.copy_(drawn(*parameter.shape))
    stack.requires_grad_(False)
    adapter = Adapter(drawn(4, 3, 6), drawn(4, 10, 3), torch.zeros(10, dtype=torch.int64), 1, scale=2.5)
    attach(stack, adapter)
    sizes, x, towards = (3, 0, 1, 4), drawn(8, 6).requires_grad_(), drawn(8, 10)
    made = stack(x, torch.tensor(sizes).cumsum(0).int())
    own, rows = x.detach().clone().requires_grad_(), []
    a, b = (each.detach().clone().requires_grad_() for each in (adapter.a, adapter.b))
    experts = [expert for expert, size in enumerate(sizes) for _ in range(size)]
    for row, expert in zip(own, experts, strict=True):
        rows.append((stack.weight[expert] + 2.5 * b[expert] @ a[expert]) @ row + stack.bias[expert])
    torch.testing.assert_close(made, torch.stack(rows), rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad((made * towards).sum(), [x, adapter.a, adapter.b])
    wanted = torch.autograd.grad((torch.stack(rows) * towards).sum(), [own, a, b])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


PLANS = {
    "olmoe": ["dp2_zero3", "pp2", "dp2_ep2"],
    "qwen2_moe": ["dp2_pp2_zero1", "dp2_ep2_tp2_sp_zero1"],
    "gpt_oss_moe": ["dp3_zero2", "cp2_ep2_tp2"],
}


@pytest.mark.parametrize("kind", PLANS)
def test_every_plan_follows_one_process_and_goes_on_where_another_stopped(recipe, kind, tmp_path):
    lora = run_of(recipe, kind, tmp_path, global_batch_size=12, micro_batch_size=6)
    losses, weights = train_and_save(lora, tmp_path / "one", STEPS)
    assert losses[-1] < losses[0] - 0.05
    shapes = {name: tuple(weight.shape) for name, weight in weights.items() if ".1.mlp.experts." in name}
    model = lora.model
    assert shapes == {
        f"blocks.1.mlp.experts.{name}": (model.num_experts, *shape)
        for name, shape in {
            "gate_up.lora.a": (RANK, 48), "gate_up.lora.b": (2 * model.expert_size, RANK),
            "down.lora.a": (RANK, model.expert_size), "down.lora.b": (48, RANK),
        }.items()
    }  # fmt: skip
    assert all(weight.any() for weight in weights.values()) and not any("router" in name for name in weights)
    for plan in PLANS[kind]:
        run, made = tmp_path / plan, parse_plan(plan)
        part = replace(lora, plan=plan, micro_batch_size=6 // (made.dp or 1))  # two micro-batches
        found = pool().run(made.world, train_and_save, part, run, 2)[0][0]
        found += train_and_save(replace(lora, init_from=None), run, STEPS)[0]  # as one process
        assert found == pytest.approx(losses, abs=1e-6), plan


def test_a_base_in_16_bits_is_frozen_and_planned(recipe, tmp_path):
    lora = run_of(recipe, "olmoe", tmp_path, precision="bf16", micro_batch_size=8)
    with open_trainer(lora) as trainer:
        before = {shard.name: shard.local.clone() for shard in trainer.shards.frozen}
        assert {weight.dtype for weight in before.values()} == {torch.bfloat16}
        first, *_, last = [trainer.mean_loss(trainer.train_step()) for _ in range(6)]
        assert last < first - 0.05
        assert all(torch.equal(shard.local, before[shard.name]) for shard in trainer.shards.frozen)
        states = [trainer.optimizer.rule.state(shard.index).values() for shard in trainer.shards]
        held = sum(t.nbytes for s, state in zip(trainer.shards, states, strict=True) for t in (s.local, *state))
        frozen = sum(shard.local.nbytes for shard in trainer.shards.frozen)
        planned = memory_of(trainer.settings, 0)
        assert planned.weights + planned.optimizer == held + frozen


@pytest.mark.parametrize("kind", EXPERTS)
def test_a_merged_model_is_that_of_its_parts_in_every_form(recipe, kind, tmp_path):
    """dtgpt's, transformers' and peft's, with shared experts and blocks without experts."""
    lora = run_of(recipe, kind, tmp_path)
    train_and_save(lora, tmp_path / "run", STEPS)
    checkpoint = tmp_path / "run" / "checkpoints" / f"step_{STEPS:08d}"
    ours = dtgpt.load(lora.init_from, adapter=checkpoint, device="cpu")(TOKENS)
    assert (ours - logits_of(lora.init_from)).abs().max() > 0.05
    convert(checkpoint, tmp_path / "merged", ConvertOptions(to="hf"))
    exact = logits_of(tmp_path / "merged", torch.float64)
    assert_round_alike(ours, logits_of(tmp_path / "merged"), exact)
    convert(checkpoint, tmp_path / "peft", ConvertOptions(to="peft"))
    again = dtgpt.load(lora.init_from, adapter=tmp_path / "peft", device="cpu")(TOKENS)
    assert_round_alike(again, ours, exact)
    model = opened_by_peft(lora.init_from, tmp_path / "peft")
    with torch.no_grad():
        assert_round_alike(model(TOKENS).logits, ours, exact)


def per_expert(base, folder, names) -> None:
    """Write an adapter as peft did before experts were stacks in transformers: of each expert's own modules."""
    model, tensors, generator = load_file(base / "model.safetensors"), {}, torch.Generator().manual_seed(5)
    for name, weight in model.items():
        module = name.removesuffix(".weight")
        if ".experts." in name and module.rpartition(".")[2] in names:
            for key, shape in {"lora_A": (4, weight.shape[1]), "lora_B": (weight.shape[0], 4)}.items():
                drawn = 0.1 * torch.randn(shape, generator=generator)
                tensors[f"base_model.model.{module}.{key}.weight"] = drawn
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(("kind", "names"), [
    ("olmoe", ["gate_proj", "up_proj", "down_proj"]), ("mixtral", ["w1", "w2", "w3"]), ("qwen3_moe", ["down_proj"]),
])  # fmt: skip
def test_adapters_of_each_experts_own_modules_are_read(kind, names, tmp_path):
    base = save_base(kind, tmp_path / "base")
    per_expert(base, tmp_path / "old", names)
    ours = dtgpt.load(base, adapter=tmp_path / "old", device="cpu")(TOKENS)
    with torch.no_grad():
        theirs: Tensor = opened_by_peft(str(base), tmp_path / "old")(TOKENS).logits
    assert (ours - logits_of(base)).abs().max() > 0.05
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 * ours.abs().max().item())


def test_an_adapter_of_other_experts_is_refused(recipe, tmp_path):
    lora = run_of(recipe, "olmoe", tmp_path)
    train_and_save(lora, tmp_path / "run", 1)
    convert(tmp_path / "run" / "checkpoints" / "step_00000001", tmp_path / "peft", ConvertOptions(to="peft"))
    path = tmp_path / "peft" / "adapter_model.safetensors"
    stored, name = load_file(path), "base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight"
    save_file(stored | {name: stored[name][:-1].contiguous()}, path)
    with pytest.raises(UserError, match=r"experts.gate_up_proj'? is not for 8 matrices"):
        dtgpt.load(lora.init_from, adapter=tmp_path / "peft")
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    for given, words in (({"target_parameters": None}, "which the model has not"), ({"target_parameters": 3}, "list")):
        (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(settings | given))
        with pytest.raises(UserError, match=words):
            dtgpt.load(lora.init_from, adapter=tmp_path / "peft")


def test_the_gate_holds_adapters_of_experts_to_float64(recipe, tmp_path):
    file = tmp_path / "one"
    lora = run_of(recipe, "glm4_moe", tmp_path)
    record = traced_record(lora, Tracing(file, tmp_path / "shared", is_reference=True))
    exact = Reference(file, record).exact
    names = {key.name for key in exact.keys if key.kind == "parameter"}
    assert "blocks.1.mlp.experts.down.lora.b" in names and not any("router" in name for name in names)
    for name in names:
        found, expected = record.tensors[f"first gradient/{name}"], exact[Key(0, "parameter", name)]
        assert (found - expected).norm() <= 1e-5 * expected.norm(), name


def test_routers_are_balanced_by_what_is_trained_before_them(recipe, tmp_path):
    """Loads of all blocks count, also of one before which nothing is trained; losses change adapters."""
    balance = BalanceConfig(loss=0.7, z_loss=0.3)
    lora = replace(LORA, targets="column")
    lora = run_of(recipe, "olmoe", tmp_path, layers=4, lora=lora, balance=balance, micro_batch_size=4)
    whole = balanced_steps(lora)
    tokens = lora.global_batch_size * lora.model.seq_length * 3
    assert [[sum(layer) for layer in loads] for loads in whole.loads] == [[tokens] * lora.model.num_layers] * STEPS
    for plan in ("dp2_zero3", "pp2"):
        found = pool().run(2, balanced_steps, replace(lora, plan=plan, micro_batch_size=2))[0]
        assert found.loads == whole.loads and found.losses == pytest.approx(whole.losses, abs=1e-6)
        for ours, theirs in zip(found.figures, whole.figures, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-6)
        for name, weight in whole.weights.items():
            torch.testing.assert_close(found.weights[name], weight, rtol=1e-4, atol=1e-5)
    plain = balanced_steps(replace(lora, balance=BalanceConfig()))
    assert plain.losses[0] == whole.losses[0] and plain.loads[0] == whole.loads[0]
    assert whole.figures[-1]["balance_loss"] < whole.figures[0]["balance_loss"]
    changed = [
        name for name, value in plain.gradients[-1].items() if not torch.allclose(value, whole.gradients[-1][name])
    ]
    assert len(changed) > 4

"""Adapters beside a base in 4 bits (QLoRA)."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import nn

import dtgpt
from dtgpt.checkpoint.open import open_checkpoint, open_source
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import OptimizerConfig
from dtgpt.interop.convert import ConvertOptions, convert
from dtgpt.models.families.qwen3_moe import QWEN3_30B_A3B
from dtgpt.ops.nf4.quantise import quantise
from dtgpt.posttrain.lora.checkpoint import SavedAdapter
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.train.init_from.shape import open_config
from dtgpt.train.setup import open_trainer
from dtgpt.util.errors import UserError
from tests.support.bodies_lora import assert_gradients_of_float64, codes_of, steps_of_peft, train_and_save
from tests.support.ranks import pool

pytestmark = pytest.mark.slow(8)

STEPS = 3
LORA = LoraConfig(rank=4, alpha=16.0, bits=4)
SIZES = {
    "vocab_size": 257, "bos_token_id": None, "eos_token_id": None, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}  # fmt: skip
TOKENS = (torch.arange(24) * 10).view(2, 12)


def save_base(folder: Path, noise: float) -> Path:
    """A model as transformers saves it, whose weights are moved by noise."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model with weights that matter."""
    return save_base(tmp_path_factory.mktemp("base"), 0.1)


@pytest.fixture
def qlora(recipe, base):
    optimizer = OptimizerConfig(lr=1e-2, warmup=0, schedule="constant", weight_decay=0.1, eps=1e-5)
    return replace(recipe, model=open_config(base), init_from=str(base), lora=LORA, optimizer=optimizer, steps=STEPS)


def test_every_plan_has_the_same_base_and_goes_on_where_another_stopped(qlora, tmp_path):
    losses, weights = train_and_save(qlora, tmp_path / "one", STEPS)
    assert losses[-1] < losses[0] - 0.01
    assert all(name.endswith((".lora.a", ".lora.b")) for name in weights)
    ((expected, planned, held),) = pool().run(1, codes_of, qlora)
    assert planned == held
    assert len(expected) == 3 * 4 * 2  # codes, scales and groups of four matrices in each block
    source = open_source(Path(qlora.init_from))
    for name in ("blocks.0.attn.qkv", "blocks.1.mlp.down"):
        for kind, tensor in quantise(source.read(f"{name}.weight"))._asdict().items():
            assert torch.equal(expected[f"{name}.{'weight' if kind == 'codes' else kind}"], tensor.float())
    sharded = () if LORA.has_whole_integers else ("dp3_zero3", "dp2_zero2")
    for plan in ("dp2", *sharded, "tp2_sp", "pp2"):
        other, world = replace(qlora, plan=plan, global_batch_size=24), parse_plan(plan).world
        found, planned, held = pool().run(world, codes_of, other)[0]
        assert found.keys() <= expected.keys()
        for name in found:
            assert torch.equal(found[name], expected[name]), (plan, name)
        assert planned == pytest.approx(held, rel=0.01)
    for plan in ("dp2" if LORA.has_whole_integers else "dp2_zero3", "tp2"):
        run = tmp_path / plan
        followed = pool().run(2, train_and_save, replace(qlora, plan=plan), run, 2)[0][0]
        followed += train_and_save(replace(qlora, init_from=None), run, STEPS)[0]
        assert followed == pytest.approx(losses, abs=1e-6), plan


def with_adapters(model: nn.Module, run: Path, qlora: Recipe) -> nn.Module:
    """Return a model of transformers with the adapters with which a run begins."""
    train_and_save(qlora, run, 0)
    convert(run / "checkpoints" / "step_00000000", run / "peft", ConvertOptions(to="peft"))
    return peft.PeftModel.from_pretrained(model, str(run / "peft"), is_trainable=True)


def losses_beside(qlora: Recipe, model: nn.Module) -> Iterator[tuple[float, float]]:
    """Yield the losses of 50 steps of a run, and of a model of peft on the same batches."""
    with open_trainer(qlora) as trainer:
        theirs = steps_of_peft(model, map(trainer.batch, range(50)), qlora.optimizer.lr)
        yield from ((trainer.mean_loss(trainer.train_step()), next(theirs)) for _ in range(50))


def test_training_follows_peft_on_the_values_that_4_bits_have(qlora, base, tmp_path):
    """In fp32, on transformers' model, whose matrices are made of 4 bits as dtgpt packs them: by kind, not by name."""
    qlora = replace(qlora, steps=50, optimizer=replace(qlora.optimizer, lr=2e-3), micro_batch_size=8)
    train_and_save(qlora, tmp_path / "still", 0)  # adapters that add nothing
    convert(tmp_path / "still" / "checkpoints" / "step_00000000", tmp_path / "values", ConvertOptions(to="hf"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "values")
    original = transformers.AutoModelForCausalLM.from_pretrained(base)
    both = zip(model.named_parameters(), original.parameters(), strict=True)
    changed = {name.split(".")[-2] for (name, new), old in both if not torch.equal(new, old)}
    assert changed == {f"{each}_proj" for each in ("q", "k", "v", "o", "gate", "up", "down")}
    for ours, theirs in losses_beside(qlora, with_adapters(model, tmp_path / "run", qlora)):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_training_follows_peft_beside_bitsandbytes(qlora, tmp_path):
    """In bf16; there queries, keys and values are matrices of their own, whose scales have other means and groups."""
    pytest.importorskip("bitsandbytes")
    base = save_base(tmp_path / "base", 0.03)
    asked = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    options = transformers.BitsAndBytesConfig(**asked, bnb_4bit_compute_dtype=torch.bfloat16)
    narrow = {"quantization_config": options, "device_map": {"": "cpu"}, "dtype": torch.bfloat16}
    model = transformers.AutoModelForCausalLM.from_pretrained(base, **narrow)
    rate = replace(qlora.optimizer, lr=5e-4)
    qlora = replace(qlora, init_from=str(base), steps=50, optimizer=rate, micro_batch_size=8, precision="bf16")
    found = list(losses_beside(qlora, with_adapters(model, tmp_path / "run", qlora)))
    assert found[-1][0] < found[0][0] - 0.1
    for ours, theirs in found:
        assert ours == pytest.approx(theirs, rel=1e-2)


def test_a_merged_model_is_the_one_that_was_trained(qlora, base, tmp_path):
    run = tmp_path / "run"
    train_and_save(qlora, run, STEPS)
    checkpoint = run / "checkpoints" / f"step_{STEPS:08d}"
    with open_trainer(replace(qlora, init_from=None), run) as trainer, torch.no_grad():
        trained = trainer.stages[0](TOKENS)[..., :257]
    ours = dtgpt.load(checkpoint, device="cpu")(TOKENS)[..., :257]
    torch.testing.assert_close(ours, trained, rtol=0, atol=1e-4)
    torch.testing.assert_close(dtgpt.load(base, adapter=checkpoint, device="cpu")(TOKENS)[..., :257], ours)
    convert(checkpoint, tmp_path / "merged", ConvertOptions(to="hf", dtype="bf16"))
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.bfloat16
    with torch.no_grad():
        near, far = (
            (each.float().logits if hasattr(each, "float") else each.logits.float()) - ours
            for each in (merged(TOKENS), transformers.AutoModelForCausalLM.from_pretrained(base)(TOKENS))
        )
    assert near.abs().max() < 0.1 * far.abs().max()
    saved = open_checkpoint(checkpoint, None, None)
    del saved.state["adapter"]["bits"]  # as in checkpoints of version 0.5 and older
    assert SavedAdapter(saved).lora == replace(LORA, bits=0)


def test_the_gate_holds_it_to_float64(qlora, tmp_path):
    assert_gradients_of_float64(qlora, tmp_path)


def test_a_torch_that_cannot_shard_integers_is_refused(qlora, monkeypatch):
    monkeypatch.setattr(LoraConfig, "torch", "2.12.1+cpu")
    with pytest.raises(
        UserError, match=r"lora.bits=4 under zero3 needs torch 2.13 or newer.* fully_shard of torch 2.12"
    ):
        replace(qlora, plan="dp2_zero3").planned(2)
    replace(qlora, plan="dp2").planned(2)
    monkeypatch.setattr(LoraConfig, "torch", "2.13.0")
    replace(qlora, plan="dp2_zero3").planned(2)


def test_what_4_bits_cannot_be_is_refused(qlora, base, tmp_path):
    for changes, words in (
        ({"lora": replace(LORA, rank=0)}, "lora.bits=4 holds weights that are not trained, and lora.rank=0 trains"),
        ({"lora": replace(LORA, bits=8)}, "lora.bits=8 is not known; use --lora.bits 4, or 0"),
        ({"init_from": None}, "adapts a model that is trained already; name it with --init_from"),
    ):
        with pytest.raises(UserError, match=words), open_trainer(replace(qlora, **changes)):
            pass
    for changes, words in (
        ({"hidden_size": 96}, "rows of blocks.0.attn.qkv.weight have 96 elements, no multiple of 64"),
        ({"ffn_hidden_size": 192}, "rows of blocks.0.mlp.down.weight have 96 elements on each of tp=2 ranks, no mult"),
    ):
        with pytest.raises(UserError, match=words):
            replace(qlora, plan="tp2", model=replace(qlora.model, **changes)).planned(2)
    mixture = replace(qlora, model=QWEN3_30B_A3B)
    with pytest.raises(UserError, match=r"lora.bits=4, but blocks.0.mlp.experts.gate_up.weight is a stack of matrices"):
        mixture.planned(1)
    train_and_save(qlora, tmp_path / "run", 1)
    with pytest.raises(UserError, match="has other adapters: bits 4 there, 0 here; give the same --lora values"):
        train_and_save(replace(qlora, lora=replace(LORA, bits=0), init_from=None), tmp_path / "run", 2)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    with (
        pytest.raises(
            UserError, match=r"blocks.1.mlp.down.weight of the base cannot be held in 4 bits: it has a value"
        ),
        open_trainer(replace(qlora, init_from=str(tmp_path / "broken"))),
    ):
        pass
    config = json.loads((base / "config.json").read_text()) | {"quantization_config": {"load_in_4bit": True}}
    shutil.copytree(base, tmp_path / "quantised")
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config))
    with (
        pytest.raises(UserError, match=r"quantization_config=.*dtgpt reads weights in F32, F16 and BF16"),
        open_trainer(replace(qlora, init_from=str(tmp_path / "quantised"))),
    ):
        pass

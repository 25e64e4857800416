"""Families whose layers differ (GPT-Neo, OLMo 3, Gemma 3, GPT-OSS, Phi-3, Qwen2.5) against transformers, and each plan
against one process."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.sections import LogConfig, OptimizerConfig
from dtgpt.inference.load import load
from dtgpt.interop.hf.model import HuggingFace
from tests.support import bodies_architecture
from tests.support.bodies_lora import train_and_save
from tests.support.families import MODELS, OURS, copy_weights, their_config, their_model, theirs_of
from tests.support.ranks import pool
from tests.support.runs import training
from tests.support.sources import filled

pytestmark = pytest.mark.slow(52)

TOLERANCE = 1e-5  # fp32, relative: rounding of other orders of summation
STEPS = 3
PLANS = {
    "gpt_neo": ["dp2_zero3", "tp2_sp", "pp2_zbv", "cp2"],
    "olmo3": ["dp2_zero3", "tp2", "tp2_sp", "tp2_pp2", "pp2_zbv", "cp2_tp2_sp_zero1"],
    "gemma3": ["dp2_zero1", "tp2", "tp2_sp", "tp2_pp2", "pp2_zbv", "cp2"],
    "gpt_oss": ["dp2_zero3", "tp2_sp", "pp2_zbv", "cp2"],
    "qwen2": ["tp2_sp", "pp2_zbv", "cp2"],
}


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def check_gradients(family, model, twin) -> None:
    ours = theirs_of(family, model.config, {name: p.grad for name, p in model.named_parameters()})
    theirs = {name: p.grad for name, p in twin.named_parameters()}
    assert ours.keys() == theirs.keys()
    used = {name for name in ours if ours[name].any() or theirs[name].any()}
    assert all(".router." in name for name in ours.keys() - used)  # of one expert
    errors = {name: relative_error(ours[name], theirs[name]) for name in used}
    assert max(errors.values()) < TOLERANCE, max(errors.items(), key=lambda entry: entry[1])


@pytest.mark.parametrize("family", MODELS)
def test_logits_loss_and_every_gradient_agree_with_transformers(tmp_path, family):
    twin = their_model(family)
    twin.save_pretrained(tmp_path / "theirs")
    model = filled(HuggingFace(tmp_path / "theirs"))
    tokens = torch.randint(131, (3, 65), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    loss, logits = model(inputs, None, targets), model(inputs)
    loss.backward()
    their_logits = twin(inputs).logits
    their_loss = cross_entropy(their_logits.flatten(0, 1), targets.flatten())
    their_loss.backward()
    assert relative_error(logits[..., :131], their_logits) < TOLERANCE
    assert relative_error(loss, their_loss) < TOLERANCE
    check_gradients(family, model, twin)


@pytest.mark.parametrize("family", ["gpt_neo", "olmo3", "gemma3", "gpt_oss"])
def test_50_steps_agree_with_transformers_and_torch_adamw(recipe, tmp_path, family):
    """Weight decay of matrices alone, clipping and warmup; accumulation over two micro-batches here. At a rate of 3e-3,
    the last bit of OLMo 3's weights moves the loss of transformers itself by 3e-5 in step 46."""
    own = their_config(family, vocab_size=257, initializer_range=0.1)
    own._attn_implementation = "eager"
    twin = type(their_model(family))(own)
    twin.save_pretrained(tmp_path / "theirs")
    config = replace(HuggingFace(tmp_path / "theirs").config, seq_length=40, init_std=0.05)
    optimizer = OptimizerConfig(lr=2e-3, min_lr=2e-3, warmup=5, weight_decay=0.1, clip=1.5, beta2=0.95)
    trainer = training(replace(recipe, model=config, steps=50, optimizer=optimizer, log=LogConfig()))
    if config.learns_positions:
        own.max_position_embeddings = 40
        twin = type(twin)(own)
    copy_weights(family, trainer.stages[0], twin)
    matrices = [p for name, p in twin.named_parameters() if p.dim() > 1 and not name.endswith("bias")]
    vectors = [p for p in twin.parameters() if not any(p is matrix for matrix in matrices)]
    decays = [{"params": part, "weight_decay": decay} for part, decay in ((matrices, 0.1), (vectors, 0.0))]
    theirs = torch.optim.AdamW(decays, 2e-3, (0.9, 0.95))
    for step in range(50):
        tokens, _, _ = trainer.objective.batches.take(step)
        loss = trainer.mean_loss(trainer.train_step())
        for group in theirs.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 5)
        their_loss = cross_entropy(twin(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        theirs.zero_grad()
        their_loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.5)
        theirs.step()
        assert loss == pytest.approx(their_loss.item(), rel=TOLERANCE), step


@pytest.mark.parametrize("family", ["gpt_neo", "olmo3", "gemma3", "gpt_oss", "qwen2"])
def test_greedy_texts_of_100_tokens_are_those_of_transformers(tmp_path, family):
    positions = {"max_position_embeddings": 128}
    twin = their_model(family, **positions).eval()
    twin.save_pretrained(tmp_path / "theirs")
    prompt = [5, 3, 8, 130, 2, 77, 9, 9]
    expected = twin.generate(
        torch.tensor([prompt]), max_new_tokens=100, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :]
    assert load(tmp_path / "theirs").generate(prompt, max_new_tokens=100, do_sample=False) == expected.tolist()


@pytest.fixture(scope="module")
def references():
    return bodies_architecture.one_process(STEPS, "model", "precision")


def recipe_of(recipe, family):
    optimizer = OptimizerConfig(lr=3e-3, warmup=2, eps=1e-4)  # so that gradients of rounding alone make no whole steps
    return replace(recipe, model=OURS[family], optimizer=optimizer, micro_batch_size=2, plan="single")


@pytest.mark.parametrize("family, plan", [(family, plan) for family, plans in PLANS.items() for plan in plans])
def test_every_plan_follows_one_process(recipe, references, family, plan):
    own = recipe_of(recipe, family)
    expected, whole_weights = references(own)
    results = pool().run(parse_plan(plan).world, bodies_architecture.train_other, replace(own, plan=plan), STEPS)
    losses, weights = results[0][:2]
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, whole in weights.items():
        torch.testing.assert_close(whole, whole_weights[name], rtol=1e-4, atol=1e-5)
    for _, _, held, planned in results:
        assert sorted(held) == sorted(planned)


@pytest.mark.parametrize(
    "family, plan", [("gpt_neo", "pp2"), ("olmo3", "tp2"), ("gemma3", "tp2_sp"), ("gpt_oss", "tp2_sp")]
)
def test_a_checkpoint_of_a_plan_goes_on_under_another(recipe, references, tmp_path, family, plan):
    own = recipe_of(recipe, family)
    found = pool().run(2, train_and_save, replace(own, plan=plan), tmp_path, 1)[0][0]
    found += pool().run(2, train_and_save, replace(own, plan="dp2_zero3"), tmp_path, STEPS)[0][0]
    assert found == pytest.approx(references(own)[0], rel=1e-6)


@pytest.mark.parametrize("family", ["olmo3", "gemma3", "gpt_oss", "qwen2"])
def test_fp8_under_tensor_parallelism_is_that_of_one_process(recipe, references, family):
    """Activations that no fused kernel knows are those of the model, also between two products in fp8."""
    own = replace(recipe, model=replace(OURS[family], dropout=0.0), micro_batch_size=2, precision="fp8", plan="single")
    expected, _ = references(own)
    found = pool().run(2, bodies_architecture.train_other, replace(own, plan="tp2_sp"), STEPS)[0][0]
    assert found == pytest.approx(expected, rel=1e-3)

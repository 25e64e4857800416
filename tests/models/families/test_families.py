"""Families whose layers differ, and those with experts, against transformers.

`tests/promises/test_pairs.py` holds their plans against one process.
"""

import functools
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from dtgpt.config.sections import LogConfig, OptimizerConfig
from dtgpt.inference.library.load import load
from dtgpt.interop.hf.model import HuggingFace
from dtgpt.models.inventory import inventory
from dtgpt.optim.muon import MuonConfig
from tests.support.families import (
    CORRECTION,
    EXPERTS,
    MODELS,
    OURS_WITH_EXPERTS,
    copy_weights,
    their_config,
    their_model,
    theirs_of,
)
from tests.support.runs import training
from tests.support.sources import filled

pytestmark = pytest.mark.slow(4)

TOLERANCE = 1e-5  # fp32, relative: rounding of other orders of summation
STEPS = 20
NEW_TOKENS = 100  # past each window


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def check_gradients(family, model, twin) -> None:
    ours = theirs_of(family, model.config, {name: p.grad for name, p in model.named_parameters()})
    theirs = {name: p.grad for name, p in twin.named_parameters()}
    corrections = [name for name in ours if name.endswith(CORRECTION)]
    assert not any(ours.pop(name).any() for name in corrections)
    assert ours.keys() == theirs.keys()
    used = {name for name in ours if ours[name].any() or theirs[name].any()}
    assert all(".router." in name for name in ours.keys() - used)  # of one expert
    errors = {name: relative_error(ours[name], theirs[name]) for name in used}
    assert max(errors.values()) < TOLERANCE, max(errors.items(), key=lambda entry: entry[1])


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """Return what gives a model of transformers and its folder, each made once."""

    @functools.cache
    def of(family: str):
        folder, twin = tmp_path_factory.mktemp(family), their_model(family)
        twin.save_pretrained(folder)
        return twin, folder

    return of


@pytest.mark.parametrize("family", MODELS)
def test_logits_loss_and_every_gradient_agree_with_transformers(twins, family):
    twin, folder = twins(family)
    model = filled(HuggingFace(folder))
    tokens = torch.randint(131, (3, 65), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    loss, logits = model(inputs, None, targets), model(inputs)
    loss.backward()
    their_logits = twin(inputs).logits
    their_loss = cross_entropy(their_logits.flatten(0, 1), targets.flatten())
    twin.zero_grad()
    their_loss.backward()
    assert relative_error(logits[..., :131], their_logits) < TOLERANCE
    assert relative_error(loss, their_loss) < TOLERANCE
    check_gradients(family, model, twin)


@pytest.mark.parametrize("family", ["gpt_neo", "olmo3", "gemma3", "gpt_oss", *EXPERTS])
def test_20_steps_agree_with_transformers_and_torch_adamw(recipe, twins, family):
    """Weight decay of matrices alone, clipping and warmup; accumulation over two micro-batches here."""
    template, folder = twins(family)
    config = replace(HuggingFace(folder).config, seq_length=40, vocab_size=257, init_std=0.05)
    optimizer = OptimizerConfig(lr=2e-3, min_lr=2e-3, warmup=5, weight_decay=0.1, clip=1.5, beta2=0.95)
    trainer = training(replace(recipe, model=config, steps=STEPS, optimizer=optimizer, log=LogConfig()))
    length = {"max_position_embeddings": 40} if config.learns_positions else {}
    own = their_config(family, vocab_size=257, **length)
    own._attn_implementation = "eager"
    twin = type(template)(own)
    copy_weights(family, trainer.stages[0], twin)
    matrices = [p for name, p in twin.named_parameters() if p.dim() > 1 and not name.endswith("bias")]
    vectors = [p for p in twin.parameters() if not any(p is matrix for matrix in matrices)]
    decays = [{"params": part, "weight_decay": decay} for part, decay in ((matrices, 0.1), (vectors, 0.0))]
    theirs = torch.optim.AdamW(decays, 2e-3, (0.9, 0.95))
    for step in range(STEPS):
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


@pytest.mark.parametrize("family", ["gpt_neo", "olmo3", "gemma3", "gpt_oss", "qwen2", *EXPERTS])
def test_greedy_texts_are_those_of_transformers(twins, family):
    twin, folder = twins(family)
    prompt = [5, 3, 8, 130, 2, 77, 9, 9]
    expected = twin.eval().generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :]
    assert load(folder).generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False) == expected.tolist()


@pytest.mark.parametrize("optimizer", [OptimizerConfig, MuonConfig])
def test_weight_decay_leaves_biases_of_experts_alone(recipe, optimizer):
    """A step without gradients moves what decays, and nothing else."""
    model = replace(OURS_WITH_EXPERTS["gpt_oss_moe"], num_layers=1, dropout=0.0)
    decays = {"weight_decay": 0.5, **({"vector_weight_decay": 0.0} if optimizer is MuonConfig else {})}
    trainer = training(replace(recipe, model=model, optimizer=optimizer(lr=0.1, warmup=0, **decays)))
    loss = trainer.gradients()
    with torch.no_grad():
        for shard in trainer.shards:
            shard.local.fill_(1.0)
            trainer.shards.gradient(shard).zero_()
    trainer.update(loss)
    moved = {shard.name for shard in trainer.shards if (shard.local != 1).any()}
    kept = {shard.name for shard in trainer.shards} - moved
    assert {"blocks.0.mlp.experts.gate_up.weight", "blocks.0.mlp.router.weight"} <= moved
    assert {"blocks.0.mlp.experts.gate_up.bias", "blocks.0.mlp.experts.down.bias", "blocks.0.norm_1.weight"} <= kept


def test_gate_and_up_of_a_shared_mlp_are_two_matrices():
    config = OURS_WITH_EXPERTS["qwen2_moe"]
    named = {parameter.name: parameter for parameter in inventory(config).parameters()}
    expected = [(range(0, 80, 2),), (range(1, 80, 2),)]
    assert config.pieces(named["blocks.0.mlp.shared.gate_up.weight"]) == expected
    assert config.pieces(named["blocks.0.mlp.shared.down.weight"]) == [(range(32),)]

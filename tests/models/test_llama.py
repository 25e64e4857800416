"""LLaMA, Mistral and Qwen3 against transformers: logits, loss, gradients, training, documents."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from dtgpt.config.sections import LogConfig, OptimizerConfig
from dtgpt.models.batch import Batch, DocumentMasks
from dtgpt.models.decoder import Decoder
from dtgpt.models.llama import LlamaConfig
from dtgpt.ops.random.philox import root_key
from tests.support.llama_twins import translate, twin_of
from tests.support.runs import training
from tests.support.whole_model import build_model

pytestmark = pytest.mark.slow(3)

TOLERANCE = 1e-5  # fp32, relative: rounding of other orders of summation
SHAPE = {
    "num_layers": 3, "hidden_size": 96, "ffn_hidden_size": 160, "seq_length": 48, "vocab_size": 301, "init_std": 0.1,
}  # fmt: skip
SCALED = {"rope_theta": 500.0, "rope_factor": 8.0, "rope_low_frequency": 1.0, "rope_high_frequency": 4.0}
MODELS = {
    "llama": LlamaConfig(num_heads=4, num_kv_heads=4, head_dim=24, **SHAPE),
    "llama 3.1": LlamaConfig(num_heads=6, num_kv_heads=2, head_dim=16, **SCALED, rope_original_length=32, **SHAPE),
    "llama 3.2": LlamaConfig(
        num_heads=4, num_kv_heads=1, head_dim=24, tied=True, **SCALED, rope_original_length=32, **SHAPE
    ),
    "mistral": LlamaConfig(num_heads=4, num_kv_heads=2, head_dim=16, rope_theta=1e6, **SHAPE),
    "qwen3": LlamaConfig(num_heads=4, num_kv_heads=2, head_dim=32, qk_norm=True, norm_eps=1e-6, tied=True, **SHAPE),
    "qwen3 8b": LlamaConfig(num_heads=8, num_kv_heads=2, head_dim=16, qk_norm=True, norm_eps=1e-6, **SHAPE),
}


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def moved(config: LlamaConfig, generator: torch.Generator) -> Decoder:
    """Return a model whose norms are off 1."""
    model = build_model(config, torch.device("cpu"), torch.float32, root_key(5))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def check_gradients(model: Decoder, twin: torch.nn.Module) -> None:
    ours = translate(model.config, {name: p.grad for name, p in model.named_parameters()})
    theirs = {name: p.grad for name, p in twin.named_parameters()}
    assert ours.keys() == theirs.keys()
    errors = {name: relative_error(gradient, theirs[name]) for name, gradient in ours.items()}
    assert max(errors.values()) < TOLERANCE, max(errors.items(), key=lambda entry: entry[1])


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_every_gradient_agree_with_transformers(name):
    config, generator = MODELS[name], torch.Generator().manual_seed(0)
    model = moved(config, generator)
    twin = twin_of(model, name.split()[0])
    tokens = torch.randint(config.vocab_size, (3, config.seq_length + 1), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    loss = model(inputs, None, targets)
    loss.backward()
    logits, their_logits = model(inputs), twin(inputs).logits
    their_loss = cross_entropy(their_logits.flatten(0, 1), targets.flatten())
    their_loss.backward()

    assert relative_error(logits[..., : config.vocab_size], their_logits) < TOLERANCE
    assert relative_error(loss, their_loss) < TOLERANCE
    check_gradients(model, twin)


@pytest.mark.parametrize("name", ["llama 3.1", "qwen3"])
def test_documents_are_those_of_positions_and_a_block_mask_in_transformers(name):
    config, generator = MODELS[name], torch.Generator().manual_seed(1)
    model = moved(config, generator)
    twin = twin_of(model, name.split()[0])
    tokens = torch.randint(1, config.vocab_size, (3, config.seq_length + 1), generator=generator)
    for row, ends in enumerate([(5, 6, 30), (0, 47), ()]):
        tokens[row, list(ends)] = 0
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    batch = DocumentMasks(0, True, True, True).apply(Batch(inputs, targets=targets))

    document = torch.nn.functional.pad((inputs == 0).cumsum(1), (1, 0))[:, :-1]
    positions = torch.tensor([[sum(row[:t] == row[t]) for t in range(len(row))] for row in document])
    causal = torch.ones(config.seq_length, config.seq_length, dtype=torch.bool).tril()
    seen = causal & (document[:, :, None] == document[:, None])
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None]
    their_logits = twin(inputs, position_ids=positions, attention_mask=mask).logits
    each = cross_entropy(their_logits.flatten(0, 1), targets.flatten(), reduction="none")
    their_loss = (each * (inputs != 0).flatten()).mean()
    their_loss.backward()

    logits = model(*batch._replace(targets=None, loss_weights=None))
    loss = model(*batch)
    loss.backward()
    assert relative_error(logits[..., : config.vocab_size], their_logits) < TOLERANCE
    assert relative_error(loss, their_loss) < TOLERANCE
    check_gradients(model, twin)


@pytest.mark.parametrize("name", ["llama 3.2", "qwen3 8b"])
def test_50_steps_agree_with_transformers_and_torch_adamw(recipe, name):
    """Weight decay of matrices alone, clipping, warmup and cosine; accumulation over two micro-batches here."""
    config = replace(MODELS[name], num_layers=2, hidden_size=64, seq_length=40, vocab_size=257, init_std=0.05)
    optimizer = OptimizerConfig(lr=3e-3, min_lr=3e-4, warmup=5, weight_decay=0.1, clip=1.5, beta2=0.95)
    trainer = training(replace(recipe, model=config, steps=50, optimizer=optimizer, log=LogConfig()))
    twin = twin_of(trainer.stages[0], name.split()[0])
    matrices = [p for p in twin.parameters() if p.dim() > 1]
    norms = [p for p in twin.parameters() if p.dim() == 1]
    theirs = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], 3e-3, (0.9, 0.95)
    )
    clipped = 0
    for step in range(50):
        tokens, _, _ = trainer.objective.batches.take(step)
        loss = trainer.mean_loss(trainer.train_step())
        done = (step - 5) / (50 - 5)
        cosine = 3e-4 + (3e-3 - 3e-4) * (1 + math.cos(math.pi * done)) / 2
        for group in theirs.param_groups:
            group["lr"] = 3e-3 * (step + 1) / 5 if step < 5 else cosine
        their_loss = cross_entropy(twin(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        theirs.zero_grad()
        their_loss.backward()
        clipped += torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.5).item() > 1.5
        theirs.step()
        assert loss == pytest.approx(their_loss.item(), rel=TOLERANCE), step
    assert 0 < clipped < 50
    weights = translate(config, {name: p.detach() for name, p in trainer.stages[0].named_parameters()})
    errors = {name: relative_error(weights[name], p) for name, p in twin.named_parameters()}
    assert max(errors.values()) < TOLERANCE, max(errors.items(), key=lambda entry: entry[1])

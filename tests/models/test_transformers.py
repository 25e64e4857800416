"""Each family of models against transformers: logits, loss, gradients, training, documents, texts.

`tests/promises/test_pairs.py` holds their plans against one process.
"""

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dtgpt.config.sections import LogConfig, OptimizerConfig
from dtgpt.data.documents.masks import DocumentMasks
from dtgpt.inference.library.load import load
from dtgpt.interop.hf.model import HuggingFace
from dtgpt.models.batch import Batch
from dtgpt.models.decoder import Decoder
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.inventory import inventory
from dtgpt.models.llama import LlamaConfig
from dtgpt.models.shared.packed import pieces
from dtgpt.ops.random.philox import root_key
from dtgpt.optim.muon import MuonConfig
from tests.support.families import CORRECTION, EXPERTS, MODELS, OURS_WITH_EXPERTS, their_model, theirs_of, twin_of
from tests.support.runs import training
from tests.support.sources import filled
from tests.support.whole_model import build_model

pytestmark = pytest.mark.slow(14)

TOLERANCE = 1e-5  # fp32, relative: rounding of other orders of summation
WARMUP = 5
NEW_TOKENS = 16  # past each window, and past the length from which YaRN scales
SHAPE = {"num_layers": 3, "hidden_size": 96, "seq_length": 48, "vocab_size": 301}
LLAMA = {**SHAPE, "ffn_hidden_size": 160, "init_std": 0.1}
SCALED = {"rope_theta": 500.0, "rope_factor": 8.0, "rope_low_frequency": 1.0, "rope_high_frequency": 4.0}
OWN = {  # models that begin here
    "gpt2": GPT2Config(num_heads=4, **SHAPE, init_std=0.02),
    "gpt2 far": GPT2Config(num_heads=4, **SHAPE, init_std=0.2),  # GELU and softmax out of their linear range
    "llama": LlamaConfig(num_heads=4, num_kv_heads=4, head_dim=24, **LLAMA),
    "llama 3.1": LlamaConfig(num_heads=6, num_kv_heads=2, head_dim=16, **SCALED, rope_original_length=32, **LLAMA),
    "llama 3.2": LlamaConfig(
        num_heads=4, num_kv_heads=1, head_dim=24, tied=True, **SCALED, rope_original_length=32, **LLAMA
    ),
    "mistral": LlamaConfig(num_heads=4, num_kv_heads=2, head_dim=16, rope_theta=1e6, **LLAMA),
    "qwen3": LlamaConfig(num_heads=4, num_kv_heads=2, head_dim=32, qk_norm=True, norm_eps=1e-6, tied=True, **LLAMA),
    "qwen3 8b": LlamaConfig(num_heads=8, num_kv_heads=2, head_dim=16, qk_norm=True, norm_eps=1e-6, **LLAMA),
}


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def check_gradients(model: Decoder, twin: nn.Module) -> None:
    ours = theirs_of(twin, model.config, {name: p.grad for name, p in model.named_parameters()})
    theirs = {name: p.grad for name, p in twin.named_parameters()}
    corrections = [name for name in ours if name.endswith(CORRECTION)]  # buffers in transformers
    assert not any(ours.pop(name).any() for name in corrections)
    assert ours.keys() == theirs.keys()
    used = {name for name in ours if ours[name].any() or theirs[name].any()}
    assert all(".router." in name for name in ours.keys() - used)  # of one expert
    errors = {name: relative_error(ours[name], theirs[name]) for name in used}
    assert max(errors.values()) < TOLERANCE, max(errors.items(), key=lambda entry: entry[1])


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Return what gives a model of transformers and its folder, each made once."""

    @functools.cache
    def of(family: str):
        folder, twin = tmp_path_factory.mktemp(family), their_model(family)
        twin.save_pretrained(folder)
        return twin, folder

    return of


def pair_of(name: str, folder_of) -> tuple[Decoder, nn.Module]:
    """Return a model whose biases and norms are off 0 and 1, and transformers' with the same weights."""
    if name in MODELS:
        twin, folder = folder_of(name)
        twin.zero_grad()
        return filled(HuggingFace(folder)), twin
    model, generator = build_model(OWN[name], torch.device("cpu"), torch.float32, root_key(5)), torch.Generator()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator.manual_seed(0))
    return model, twin_of(model)


@pytest.mark.parametrize("name", [*OWN, *MODELS])
def test_logits_loss_and_every_gradient_agree_with_transformers(folder_of, name):
    model, twin = pair_of(name, folder_of)
    size = model.config.vocab_size
    tokens = torch.randint(size, (3, min(64, model.config.seq_length) + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    loss, logits = model(inputs, None, targets), model(inputs)
    loss.backward()
    their_logits = twin(inputs).logits
    their_loss = cross_entropy(their_logits.flatten(0, 1), targets.flatten())
    their_loss.backward()
    assert logits.shape[-1] % 128 == 0 and their_logits.shape[-1] == size
    assert relative_error(logits[..., :size], their_logits) < TOLERANCE
    assert relative_error(loss, their_loss) < TOLERANCE
    check_gradients(model, twin)


@pytest.mark.parametrize("name", ["llama 3.1", "qwen3"])
def test_documents_are_those_of_positions_and_a_block_mask_in_transformers(folder_of, name):
    model, twin = pair_of(name, folder_of)
    config = model.config
    tokens = torch.randint(1, config.vocab_size, (3, config.seq_length + 1), generator=torch.Generator().manual_seed(1))
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


@pytest.mark.parametrize(("name", "steps"), [
    ("llama 3.2", 14), ("qwen3 8b", 14), *((name, 7) for name in ("gpt_neo", "olmo3", "gemma3", "gpt_oss", *EXPERTS))
])  # fmt: skip
def test_steps_agree_with_transformers_and_torch_adamw(recipe, folder_of, name, steps):
    """Weight decay of matrices alone, clipping, warmup and cosine; of our own models, accumulation over two
    micro-batches."""
    config = replace(OWN[name], num_layers=2, hidden_size=64) if name in OWN else HuggingFace(folder_of(name)[1]).config
    config = replace(config, seq_length=40, vocab_size=257, init_std=0.05)
    optimizer = OptimizerConfig(lr=2e-3, min_lr=2e-4, warmup=WARMUP, weight_decay=0.1, clip=1.5, beta2=0.95)
    recipe = replace(recipe, micro_batch_size=4 if name in OWN else 8)
    trainer = training(replace(recipe, model=config, steps=steps, optimizer=optimizer, log=LogConfig()))
    twin = twin_of(trainer.stages[0])
    matrices = [p for name, p in twin.named_parameters() if p.dim() > 1 and not name.endswith("bias")]
    vectors = [p for p in twin.parameters() if not any(p is matrix for matrix in matrices)]
    decays = [{"params": part, "weight_decay": decay} for part, decay in ((matrices, 0.1), (vectors, 0.0))]
    theirs, clipped = torch.optim.AdamW(decays, 2e-3, (0.9, 0.95)), 0
    for step in range(steps):
        tokens, _, _ = trainer.objective.batches.take(step)
        loss = trainer.mean_loss(trainer.train_step())
        cosine = 2e-4 + (2e-3 - 2e-4) * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP))) / 2
        for group in theirs.param_groups:
            group["lr"] = 2e-3 * (step + 1) / WARMUP if step < WARMUP else cosine
        their_loss = cross_entropy(twin(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        theirs.zero_grad()
        their_loss.backward()
        clipped += torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.5).item() > 1.5
        theirs.step()
        assert loss == pytest.approx(their_loss.item(), rel=TOLERANCE), step
    assert clipped
    if name in OWN:
        weights = theirs_of(twin, config, {name: p.detach() for name, p in trainer.stages[0].named_parameters()})
        errors = {name: relative_error(weights[name], p) for name, p in twin.named_parameters()}
        assert max(errors.values()) < TOLERANCE, max(errors.items(), key=lambda entry: entry[1])


@pytest.mark.parametrize("family", ["gpt_neo", "olmo3", "gemma3", "gpt_oss", "qwen2", *EXPERTS])
def test_greedy_texts_are_those_of_transformers(folder_of, family):
    twin, folder = folder_of(family)
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
    assert pieces(config, named["blocks.0.mlp.shared.gate_up.weight"]) == expected
    assert pieces(config, named["blocks.0.mlp.shared.down.weight"]) == [(range(32),)]

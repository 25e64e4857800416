"""The model of track 3 against a plain one in torch; the order of its batches; its training under plans."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.config.plan_choice import parse_plan
from dtgpt.data.megatron.samples import Samples, sequential_index
from dtgpt.data.megatron.token_shards import TokenShards
from dtgpt.models.decoder import unique_parameters
from dtgpt.models.families.track3 import Track3Config
from dtgpt.ops.random.philox import root_key
from dtgpt.optim.muon import MuonConfig
from dtgpt.train.setup import read_dataset
from dtgpt.util.errors import UserError
from tests.support import bodies_architecture
from tests.support.ranks import pool
from tests.support.whole_model import build_model

TINY = Track3Config(num_layers=2, hidden_size=32, num_heads=2, seq_length=16, vocab_size=257)
MUON = MuonConfig(
    lr=0.01, embedding_lr=0.1, head_lr=0.004, vector_lr=0.01, table_weight_decay=0.001, vector_weight_decay=0.001,
    newton_schulz="convergent", newton_schulz_steps=12, adjust_lr="original", schedule="wsd", wsd_decay=0.7, warmup=0,
)  # fmt: skip


def plain_loss(weights: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of `TINY`, from its description alone."""
    size, eps = 16, 2.0**-23
    pairs = torch.arange(size // 4)
    turns = torch.cat([1024.0 ** (-pairs / (size // 4 - 1)), torch.zeros(size // 4)])
    angle = torch.arange(tokens.shape[1])[:, None] * turns  # [T, D / 2]

    def scaled(x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain

    def turned(x: Tensor) -> Tensor:
        both = torch.complex(*x.split(size // 2, -1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([both.real, both.imag], -1)

    def affine(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    x = scaled(weights["embedding.tokens.weight"][tokens], weights["embedding.norm.weight"])
    for i in range(2):
        at = f"blocks.{i}"
        qkv = affine(scaled(x, weights[f"{at}.norm_1.weight"]), f"{at}.attn.qkv").unflatten(-1, (2, 3, size))
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # [B, N, T, D]
        scores = 0.12 * turned(scaled(q)) @ turned(scaled(k)).mT
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        heads = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        x = x + affine(heads.transpose(1, 2).flatten(2), f"{at}.attn.proj")
        h = affine(scaled(x, weights[f"{at}.norm_2.weight"]), f"{at}.mlp.fc")
        x = x + affine(h.clamp(min=0) ** 2, f"{at}.mlp.proj")
    z = affine(scaled(x, weights["head.norm.weight"]), "head.output")[..., :257]
    return F.cross_entropy((15 * z / (z * z + 225).sqrt()).flatten(0, 1), targets.flatten())


def test_loss_and_gradients_are_those_of_the_description():
    model = build_model(TINY, torch.device("cpu"), torch.float32, root_key(5))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # all outputs are 0 in the beginning
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    tokens = torch.randint(257, (3, 17), generator=generator)
    copies = {name: p.detach().clone().requires_grad_() for name, p in unique_parameters(model).items()}
    loss = model(tokens[:, :-1], targets=tokens[:, 1:])
    expected = plain_loss(copies, tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name, parameter in unique_parameters(model).items():
        torch.testing.assert_close(parameter.grad, copies[name].grad, rtol=1e-4, atol=1e-5)
    logits = model(tokens[:, :-1]).detach()[..., :257]
    torch.testing.assert_close(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), loss.detach())


@pytest.mark.slow(2)
@pytest.mark.parametrize("plan", ["dp2_zero3", "tp2_sp", "pp2_zbv"])
def test_every_plan_follows_one_process(recipe, plan):
    base = replace(recipe, model=replace(TINY, num_layers=4), optimizer=MUON, plan="single", steps=3)
    base = replace(base, micro_batch_size=2, global_batch_size=8)
    expected, weights = bodies_architecture.train_other(base, 3)[:2]
    results = pool().run(parse_plan(plan).world, bodies_architecture.train_other, replace(base, plan=plan), 3)
    losses, found, _, _ = results[0]
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, whole in found.items():
        torch.testing.assert_close(whole, weights[name], rtol=1e-4, atol=2e-5)
    for _, _, held, planned in results:
        assert sorted(held) == sorted(planned)


def test_sequential_batches_are_consecutive_tokens_of_each_file(tmp_path):
    """As in modded-nanogpt: the next file begins where position + batch + 1 would reach the end."""
    sizes, length, batch = (33, 34, 20, 50), 4, 2
    for number, size in enumerate(sizes):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, size
        tokens = np.arange(size, dtype="<u2") + 100 * number
        (tmp_path / f"{number}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    files = TokenShards(sorted(tmp_path.glob("*.bin")))
    samples = Samples(files, sequential_index(files.lengths, length, batch, "it"))
    expected = []
    for number, size in enumerate(sizes):
        position = 0
        while position + batch * length + 1 < size:
            first = 100 * number + position
            expected += [list(range(first + i * length, first + (i + 1) * length + 1)) for i in range(batch)]
            position += batch * length
    assert samples.windows(range(len(samples))).tolist() == expected
    with pytest.raises(UserError, match="has no file of more than"):
        sequential_index(files.lengths, length, 100, "it")


@pytest.mark.parametrize(
    "data", [{}, {"path": "0.bin", "split": "9,1,0"}, {"path": "0.bin 0.bin", "valid_path": "0.bin"}]
)
def test_a_sequential_order_takes_shards_alone(recipe, tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 2000
    (tmp_path / "0.bin").write_bytes(header.tobytes() + np.zeros(2000, "<u2").tobytes())
    data = replace(recipe.data, order="sequential", tokenizer="ids" if data else recipe.data.tokenizer, **data)
    with pytest.raises(UserError, match=r"order=sequential takes the shards .* --data\.order shuffled"):
        read_dataset(replace(recipe, data=data))

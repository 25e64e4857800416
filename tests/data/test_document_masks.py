"""Documents within a window: positions, attention and loss, against the definitions token by token."""

import itertools
import json
from dataclasses import replace

import pytest
import torch

from dtgpt.data.documents.masks import DocumentMasks, document_bounds, reset_positions
from dtgpt.models.batch import Batch
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.attention.core import causal_attention, hidden_columns
from dtgpt.ops.loss.cross_entropy import cross_entropy
from dtgpt.ops.loss.head import head_loss
from dtgpt.ops.random.philox import root_key
from dtgpt.train.loop import train
from tests.support.ranks import pool
from tests.support.runs import change, losses, newest_run, training
from tests.support.whole_model import build_model

EOD = 7
CASES = 60
ALL = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


def random_tokens(generator):
    """Many EODs, also side by side and at both ends."""
    batch, width = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 5), (1, 20)))
    tokens = torch.randint(0, 30, (batch, width), generator=generator)
    return torch.where(torch.rand(batch, width, generator=generator) < 0.3, EOD, tokens)


def naive(tokens):
    """Of one sample: where each token stands in its document, and from where to where that goes."""
    lasts = [i for i, token in enumerate(tokens) if token == EOD or i == len(tokens) - 1]
    spans, begin = [], 0
    for last in lasts:
        spans += [[begin, last + 1]] * (last + 1 - begin)
        begin = last + 1
    return [i - first for i, (first, _) in enumerate(spans)], spans


def test_any_window_is_marked_token_by_token():
    generator = torch.Generator().manual_seed(0)
    for case in range(CASES):
        tokens = random_tokens(generator)
        wanted = case % 2 == 0, case // 2 % 2 == 0, case // 4 % 2 == 0
        found = DocumentMasks(EOD, *wanted).apply(Batch(tokens))
        masks = found.positions, found.document_bounds, found.loss_weights
        assert tuple(mask is not None for mask in masks) == wanted
        positions, spans = zip(*map(naive, tokens.tolist()), strict=True)
        for mask, expected in zip(masks[:2], (positions, spans), strict=True):
            assert mask is None or mask.tolist() == list(map(list, expected))
        assert found.loss_weights is None or torch.equal(found.loss_weights, (tokens != EOD).float())


def test_attention_stays_within_documents():
    """Megatron-LM masks, for each EOD at i, the rows after i in the columns up to i."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(CASES):
        tokens = random_tokens(generator)
        length = tokens.shape[1]
        seen = ~hidden_columns(length, length, tokens.device, document_bounds(tokens == EOD))
        for row, expected in zip(tokens.tolist(), seen[:, 0], strict=True):
            mask = torch.ones(length, length).tril()
            for i in (i for i, token in enumerate(row) if token == EOD):
                mask[i + 1 :, : i + 1] = 0
            assert torch.equal(expected, mask > 0)


def test_a_window_without_an_end_is_one_document():
    ends = torch.zeros(2, 5, dtype=torch.bool)
    assert (
        reset_positions(ends).tolist() == [[0, 1, 2, 3, 4]] * 2 and document_bounds(ends).tolist() == [[[0, 5]] * 5] * 2
    )
    assert reset_positions(~ends).tolist() == [[0] * 5] * 2
    assert document_bounds(~ends).tolist() == [[[i, i + 1] for i in range(5)]] * 2


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("backend", ["auto", "explicit", "fused_softmax", "sdpa", "flash"])
def test_every_back_end_hides_the_same(backend, dropout):
    if backend == "sdpa" and dropout:
        pytest.skip("it cannot drop by index")
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(2, 12, 4, 3, 8, generator=generator)
    key = torch.tensor([[1, 2], [3, 4]]) if dropout else None
    spans = torch.tensor([[[0, 5]] * 5 + [[5, 12]] * 7, [[0, 12]] * 12], dtype=torch.int32)
    found = causal_attention(*qkv.unbind(3), key, dropout, spans=spans, backend=backend)
    expected = causal_attention(*qkv.unbind(3), key, dropout, spans=spans, backend="explicit")
    assert torch.allclose(found, expected, atol=1e-6)
    plain = causal_attention(*qkv.unbind(3), key, dropout, backend="explicit")
    assert torch.allclose(found[1], plain[1], atol=1e-6) and torch.allclose(found[0, :5], plain[0, :5], atol=1e-6)
    assert not torch.allclose(found[0, 5:], plain[0, 5:], atol=1e-3)


def test_a_document_does_not_feel_what_stands_before_it():
    """Its logits are those that it has alone."""
    config = GPT2Config(num_layers=2, hidden_size=32, num_heads=2, seq_length=16, vocab_size=30)
    model = build_model(config, torch.device("cpu"), torch.float32, root_key(1))
    before, own = torch.tensor([[3, 4, 5, EOD]]), torch.tensor([[9, 8, 1, 2, 6]])
    both = torch.cat([before, own], dim=1)
    found = model(*DocumentMasks(EOD, True, True, False).apply(Batch(both)))
    assert torch.allclose(found[:, 4:], model(own), atol=1e-5)
    assert not torch.allclose(model(both)[:, 4:], model(own), atol=1e-2)


@pytest.mark.parametrize("loss", [head_loss, lambda x, w, *rest, **more: cross_entropy(x @ w.T, *rest, **more)])
def test_weights_of_losses_and_their_gradients(loss):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 5, 8, generator=generator, requires_grad=True)
    weight = torch.randn(128, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, 100, (3, 5), generator=generator)
    weights = torch.rand(3, 5, generator=generator).round() * 1.5
    found = loss(x, weight, targets, 100, weights=weights)
    each = torch.nn.functional.cross_entropy(
        (x @ weight.T)[..., :100].flatten(0, 1), targets.flatten(), reduction="none"
    )
    expected = (each * weights.flatten()).mean()
    assert torch.allclose(found, expected, rtol=1e-5)
    wanted = torch.autograd.grad(expected, (x, weight))
    for a, b in zip(torch.autograd.grad(found, (x, weight)), wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(loss(x, weight, targets, 100, weights=weights), expected, rtol=1e-5)


@pytest.fixture
def recipe(recipe, text):
    """Many short documents of different lengths, so that replicas count different numbers of targets."""
    path = text.with_suffix(".jsonl")
    path.write_text("".join(json.dumps({"text": "abcdefghij"[: 1 + i % 9]}) + "\n" for i in range(600)))
    return change(recipe, data={"path": str(path), **ALL}, steps=2, model={"num_layers": 4})


def test_the_loss_is_that_of_what_counts_in_the_global_batch(recipe):
    run = training(change(recipe, model={"dropout": 0.0}))
    windows, _, _ = run.objective.batches.take(0)
    batch = DocumentMasks(256, True, True, True).apply(Batch(windows[:, :-1], targets=windows[:, 1:]))
    total = run.engine.model(*batch) * batch.loss_weights.numel()
    assert run.mean_loss(run.train_step()) == pytest.approx((total / batch.loss_weights.sum()).item(), rel=1e-5)


@pytest.fixture(scope="module")
def alone():
    """The losses of one process, which every folder of data and runs has alike."""
    return {}


@pytest.fixture
def whole(recipe, alone):
    if not alone:
        train(replace(recipe, plan="single"))
        alone.update(losses(newest_run(recipe)))
    return alone


@pytest.mark.slow(4)
@pytest.mark.parametrize(
    "plan", ["dp2", "tp2_sp", "pp2_zbv", *(pytest.param(plan, marks=pytest.mark.long) for plan in ("dp2_zero2", "pp2"))]
)
def test_every_plan_follows_one_process(recipe, whole, plan):
    parted = replace(recipe, plan=plan, micro_batch_size=2, runs=f"{recipe.runs}-{plan}")
    assert pool().run(2, train, parted) == [0, 0]
    assert losses(newest_run(parted)) == pytest.approx(whole, rel=1e-5)


@pytest.mark.slow(1)
def test_each_option_changes_the_run(recipe):
    off = change(recipe, data=dict.fromkeys(ALL, False), log={"eval_interval": 0, "sample_tokens": 0})
    found = []
    for option in (None, *ALL):
        train(change(off, data={option: True} if option else {}))
        found.append(losses(newest_run(recipe)))
    assert all(one != other for one, other in itertools.combinations(found, 2))


def test_recomputation_hides_the_same(recipe, whole):
    for recompute in ("selective", "full"):
        train(replace(recipe, recompute=recompute))
        assert losses(newest_run(recipe)) == whole

"""Chats that share a sample have the loss and the gradients that they have alone."""

from dataclasses import replace

import pytest
import torch

from dtgpt.data.chats.packed import BEGINS, COUNTS
from dtgpt.models.decoder import unique_parameters
from dtgpt.train.startup import open_trainer

LENGTHS = (5, 6, 6)  # of chats, which fill a sample of 16 + 1 tokens


def test_packed_chats_have_the_loss_and_gradients_of_chats_alone(recipe):
    tokens = torch.randint(256, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    marks = torch.tensor([BEGINS if i == 0 else COUNTS * (i > 2) for n in LENGTHS for i in range(n)])
    packed = torch.stack([tokens, marks], -1)
    alone = torch.zeros(len(LENGTHS), *packed.shape, dtype=torch.int64)
    for row, chat in enumerate(packed.split(LENGTHS)):
        alone[row, : len(chat)] = chat
    results = []
    with open_trainer(replace(recipe, model=replace(recipe.model, dropout=0.0))) as trainer:
        for windows in (packed[None], alone):
            batch = trainer.masks.batch(windows)
            (model,), weights = trainer.stages, batch.loss_weights
            model.zero_grad()
            loss = model(*batch) * weights.numel() / weights.sum()
            loss.backward()
            results.append((loss.item(), {name: p.grad.clone() for name, p in unique_parameters(model).items()}))
    (loss, gradients), (loss_alone, gradients_alone) = results
    assert loss == pytest.approx(loss_alone, rel=1e-6)
    for name, gradient in gradients.items():
        atol = 1e-6 * gradient.abs().max().item() + 1e-9
        torch.testing.assert_close(gradient, gradients_alone[name], rtol=0, atol=atol)
